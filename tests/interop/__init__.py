"""Tests of duemq with Apache's clients, tools, brokers and stores; `--target` points the same tests at Apache's
broker."""
