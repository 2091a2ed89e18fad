"""Streams and events: one stream per device, waiting, times."""

from __future__ import annotations

import pytest
import torch

import lazyxla


def test_one_stream_per_device():
    stream = torch.lazyxla.current_stream()
    assert stream.stream_id == 0
    assert stream == torch.lazyxla.default_stream() == torch.accelerator.current_stream()
    assert torch.Stream("lazyxla:1").device == torch.device("lazyxla:1")
    assert torch.Stream("lazyxla:0") != stream
    assert stream.query()
    stream.synchronize()
    torch.accelerator.set_stream(stream)


def test_stream_context():
    stream, before = torch.Stream("lazyxla:1"), torch.lazyxla.current_stream()
    for context in (torch.lazyxla.stream(stream), stream):
        with context:
            assert lazyxla.current_device() == 1
            assert torch.accelerator.current_stream() == torch.lazyxla.current_stream() == stream
            assert torch.lazyxla.default_stream().stream_id == 0
            assert torch.ones(2, device="lazyxla").device.index == 1
        assert lazyxla.current_device() == 0
        assert torch.lazyxla.current_stream() == before
    with torch.lazyxla.stream(None):
        assert lazyxla.current_device() == 0


def test_synchronize():
    torch.accelerator.synchronize()
    lazyxla.synchronize("lazyxla:1")
    lazyxla.sync(wait=True)


def test_events():
    stream = torch.lazyxla.current_stream()
    event = torch.Event("lazyxla")
    assert event.query()  # never recorded
    event.record()
    event.synchronize()
    assert event.query()
    event.wait(stream)
    stream.wait_event(stream.record_event())
    stream.wait_stream(torch.Stream("lazyxla:1"))


def test_an_event_is_recorded_while_another_thread_waits_for_it(run_python):
    """What is waited for may have to be lowered, which needs the GIL."""
    code = """
import threading, torch, lazyxla
event = torch.Event("lazyxla")
for size in range(10):
    x = torch.ones(size + 3, device="lazyxla")
    for _ in range(30):
        x = (x * 1.5).sin()  # a new program each time
    event.record()
    waiting = threading.Thread(target=event.synchronize)
    waiting.start()
    while waiting.is_alive():
        event.record()
    event.synchronize()
print(lazyxla.counters()["lowerings"])
"""
    assert int(run_python(code).stdout) >= 10


def test_event_times():
    start, end = (torch.Event("lazyxla", enable_timing=True) for _ in range(2))
    start.record()
    end.record()
    assert 0 <= start.elapsed_time(end) < 10_000
    plain = torch.Event("lazyxla")
    plain.record()
    with pytest.raises(ValueError, match="enable_timing=True"):
        start.elapsed_time(plain)
