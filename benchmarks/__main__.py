"""Every benchmark, one after the other: `python -m benchmarks`."""

from benchmarks import dispatch, optimizers, parallel_block, start_up

if __name__ == "__main__":
    dispatch.main([])
    optimizers.main([])
    parallel_block.main([])
    start_up.main([])
