#!/usr/bin/env bash
# Runs a job of duemq's on a Spark cluster: submit.sh analyse hdfs:///rocketmq/store --out /var/lib/duemq-report
#
#   MASTER           where Spark runs: yarn (default), spark://host:7077, k8s://https://host:6443, local[2]
#   PYTHON           the executors' Python, 3.11 or newer (default: python3), with numpy, pandas, pyarrow, msgspec,
#                    structlog and zlib-ng
#   EXECUTORS        the number of executors (default: 4), each with two tasks at a time
#   EXECUTOR_MEMORY  memory of each executor's Java (default: 2g); its Python processes get the same again
#   SPARK_SUBMIT     the program (default: spark-submit)
#   CLASSPATH, HADOOP_HOME, ARROW_LIBHDFS_DIR, LIBHDFS_OPTS
#                    for hdfs://, if a machine's own `java` and `hadoop` do not suffice: Hadoop's jars and home, the
#                    directory of libhdfs.so, and the options of the Java that it starts in each Python process. Those
#                    that are set are passed on to the executors
#
# The code that tasks import is sent as a zip. The driver runs here, in client mode, and writes --out to this machine's
# disk; it needs duemq[spark]. All executors must have access to the store: hdfs://, s3://, or a shared directory.
# Exit code: the job's: 1 if an audit found lost messages, 2 if the job could not be done, 3 if a limit is exceeded.
set -euo pipefail

if [ $# -lt 2 ]; then
  sed -n '2,/^set/{/^set/!s/^# \{0,1\}//p}' "$0" >&2
  exit 2
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
duemq spark package "$work/duemq-spark.zip"
# spark-submit takes a .py as its main file, not a zip.
unzip -q -p "$work/duemq-spark.zip" __main__.py > "$work/duemq_spark.py"

# In client mode the driver has a Python of its own: the executors are on other machines, with other paths.
export PYSPARK_DRIVER_PYTHON=${PYSPARK_DRIVER_PYTHON:-$(dirname "$(command -v duemq)")/python}
export PYSPARK_PYTHON=${PYTHON:-python3}

hadoop=()
for name in CLASSPATH HADOOP_HOME ARROW_LIBHDFS_DIR LIBHDFS_OPTS; do
  if [ -n "${!name:-}" ]; then
    hadoop+=(--conf "spark.executorEnv.$name=${!name}")
  fi
done

"${SPARK_SUBMIT:-spark-submit}" \
  --master "${MASTER:-yarn}" \
  --deploy-mode client \
  --name "duemq $1" \
  --py-files "$work/duemq-spark.zip" \
  --driver-memory 2g \
  --num-executors "${EXECUTORS:-4}" \
  --executor-cores 2 \
  --executor-memory "${EXECUTOR_MEMORY:-2g}" \
  --conf spark.executor.memoryOverhead="${EXECUTOR_MEMORY:-2g}" \
  "${hadoop[@]}" \
  "$work/duemq_spark.py" "$@"
