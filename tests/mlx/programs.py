"""Programs that run in processes of their own, and know only what they are told."""

import json
import subprocess
import sys
import textwrap

WAIT_S = 300.0
"""Longer than anything here takes, also without a fast BLAS."""


def run(program, *arguments, timeout_s=WAIT_S):
    """Runs a program, which must end well and complain of nothing; returns what it prints."""
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    return ran.stdout


def asked(program, *arguments):
    """Runs a program that is told, and answers, JSON."""
    return json.loads(run(program, json.dumps(arguments)))
