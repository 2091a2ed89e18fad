"""PyTorch's own device tests on the device: ``python -m tests.upstream``.

None of these tests are here: `source` fetches the source package of PyTorch that Debian has and
unpacks the tests, `worker` runs those of one file in a process of their own, `__main__` feeds the
workers and compares what fails with known_failures.txt.
"""
