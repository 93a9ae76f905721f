"""`python -m shardwise` is the command `shardwise`."""

from shardwise.cli.main import main

if __name__ == "__main__":
    main(prog_name="shardwise")
