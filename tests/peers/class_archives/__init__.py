"""Archives of the classes that Apache's programs load: with one, a program's start takes half of the CPU time.

A test run starts some hundred JVMs. Java ignores an archive that is missing, or of other classes (-Xshare:auto, its
default)."""
