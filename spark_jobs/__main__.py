"""The jobs for spark-submit: `spark-submit --py-files duemq-spark.zip spark_jobs/__main__.py audit STORE`."""

from duemq.spark_jobs.cli.commands import main

main(prog_name="duemq spark")
