"""The program around the C++ client; it runs with the folder of the wheel on PYTHONPATH."""
