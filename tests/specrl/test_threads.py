"""Runs of two processes are compared bit for bit, so both must add in the same order."""

import subprocess
import sys

import torch


def test_processes_that_tests_start_compute_with_as_many_threads_as_this_one():
    program = "import torch; print(torch.get_num_threads())"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(found.stdout) == torch.get_num_threads() == 1
