"""Pages of docs/: their code, which tests run, and their tables, which tests compare with the code of duemq."""
