"""Every benchmark, one after the other: `python -m benchmarks`."""

from benchmarks import dispatch, start_up

if __name__ == "__main__":
    dispatch.main([])
    start_up.main([])
