"""What all tests need."""

import os
import signal

# A shell that starts the tests in the background makes them, and what they start, ignore Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Triton reads this when it is imported, and torch may import it with any test file: the kernels then run
# on the CPU, for test_attention_triton.py. Nothing else here uses Triton.
os.environ["TRITON_INTERPRET"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # and all else too, wherever the tests run: no compiler for GPUs now
