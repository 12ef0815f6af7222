"""What all tests need."""

import signal

# A shell that starts the tests in the background makes them, and what they start, ignore Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
