"""Messages between the ranks of one host."""

import os
import subprocess
import sys

import pytest

from shardwise.debug.first_difference import make_mailbox, open_mailbox

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="of Linux")


def test_a_message_is_read_by_its_number():
    mine = make_mailbox()
    other = open_mailbox(mine.address)
    assert mine.get(1) is None
    other.put(1, 5, True)
    other.put(2, -(1 << 63), False)
    assert (mine.get(1), mine.get(2), mine.get(3)) == ((5, 1), (-(1 << 63), 0), None)
    other.put(65, 7, True)  # in the slot of 1
    assert (mine.get(1), mine.get(65)) == (None, (7, 1))


def test_a_message_that_is_half_written_is_not_there_yet():
    mine = make_mailbox()
    mine.put(1, 5, True)
    assert mine.get(1) is not None
    mine._memory[32 + 8] ^= 1  # the first byte of its digest
    assert mine.get(1) is None


def test_another_process_writes():
    mine = make_mailbox()
    program = f"""
from shardwise.debug.first_difference import open_mailbox
open_mailbox({mine.address!r}).put(7, 1234, True)
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    assert mine.get(7) == (1234, 1)


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
