"""Messages between the ranks of one host."""

import os
import subprocess
import sys

import pytest

from shardwise.debug.mailbox import make_mailbox, open_mailbox

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="of Linux")


def test_a_message_is_read_by_its_number():
    mine = make_mailbox()
    other = open_mailbox(mine.address)
    assert mine.get(1) is None
    assert other.put(1, b"one")
    assert other.put(2, b"")
    assert (mine.get(1), mine.get(2), mine.get(3)) == (b"one", b"", None)
    assert other.put(65, b"in the slot of 1")
    assert (mine.get(1), mine.get(65)) == (None, b"in the slot of 1")
    assert not other.put(3, b"too long" * 100)
    assert mine.get(3) is None


def test_a_message_that_is_half_written_is_not_there_yet():
    mine = make_mailbox()
    mine.put(1, b"whole")
    mine._memory[256 + 14] ^= 1  # the first byte of its text
    assert mine.get(1) is None


def test_another_process_writes():
    mine = make_mailbox()
    program = f"""
from shardwise.debug.mailbox import open_mailbox
open_mailbox({mine.address!r}).put(7, b"from elsewhere")
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    assert mine.get(7) == b"from elsewhere"


def test_what_cannot_be_shared_is_not_opened(tmp_path):
    host, process, _ = make_mailbox().address.split()
    with (tmp_path / "file").open("w") as file:
        read, write = os.pipe()
        for address in (
            "",
            f"other-host {process} 3",
            f"{host} {process} {file.fileno()}",  # of another size
            f"{host} {process} {read}",
            f"{host} {process} 99999",
            f"{host} {process} ../../file",
        ):
            assert open_mailbox(address) is None
        os.close(read)
        os.close(write)
    gone = make_mailbox()
    address = gone.address
    del gone
    assert open_mailbox(address) is None
