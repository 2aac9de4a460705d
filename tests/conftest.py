import signal


def pytest_configure() -> None:
    # a shell ignores Ctrl-C for what it starts in the background, and children inherit that
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
