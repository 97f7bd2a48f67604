#!/usr/bin/env python3
"""Whether the image can serve: edged's examination finds no failure, and the embedded model is one that it serves."""

import subprocess

for command in (["edged", "doctor", "--config", "/dev/null", "--within", "120"], ["edged", "models", "check", "demo"]):
    # 1 means warnings, as there is neither a unit nor a profile in an image.
    code = subprocess.run(command, check=False).returncode
    assert code in (0, 1), f"{' '.join(command)} ended with {code}"
print("edged: OK")
