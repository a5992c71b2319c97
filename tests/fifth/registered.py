"""`python -m pytest -p fifth.registered …` registers the fifth problem before the tests are collected, as a row in models.py would. Of
each test only the first case that is selected runs: enough to see that it serves a new problem.
"""

import pytest

import models
from fifth.conv2d_relu_hardswish import PROBLEM

models.register(PROBLEM)


@pytest.hookimpl(trylast=True)  # after -k has chosen
def pytest_collection_modifyitems(config, items):
    first, others = {}, []
    for item in items:
        key = item.path, item.originalname, bool(item.get_closest_marker("gpu"))
        if first.setdefault(key, item) is not item:
            others.append(item)
    items[:] = first.values()
    config.hook.pytest_deselected(items=others)
