"""QKV_STRICT=1 makes an error of every fallback to the unfused reference. Tests of what has no fused
kernel say so: they are marked `unfused`, and may."""

import pytest


@pytest.fixture(autouse=True)
def _unfused_is_allowed(request, monkeypatch):
    if request.node.get_closest_marker("unfused"):
        monkeypatch.delenv("QKV_STRICT", raising=False)
