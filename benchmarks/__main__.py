"""Every benchmark, one after the other: `python -m benchmarks`."""

from benchmarks import dispatch, optimizers, start_up

if __name__ == "__main__":
    dispatch.main([])
    optimizers.main([])
    start_up.main([])
