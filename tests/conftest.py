"""One thread for each product where tests share the cores: threads that wait for others spin."""

import os

if "PYTEST_XDIST_WORKER" in os.environ:
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")
