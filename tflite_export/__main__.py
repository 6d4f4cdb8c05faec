"""Runs the command line: `python -m tflite_export`."""

from tflite_export.cli import main

main(prog_name="python -m tflite_export")
