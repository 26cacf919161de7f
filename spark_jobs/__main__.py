"""The jobs for spark-submit: `spark-submit --py-files duemq-spark.zip spark_jobs/__main__.py audit STORE`."""

from spark_jobs.cli import main

main(prog_name="duemq spark")
