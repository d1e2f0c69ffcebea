"""The ledger of a stream that comes only once: rows of numbers that replicas carry."""

from __future__ import annotations

from rallypoint.core.streams.ledger import READERS, ROW, ReadBy, ledger_of, noted, readers_in, sentence_of

EMPTY = [0] * ROW


def test_a_row_names_each_process_with_what_it_has_used_and_read() -> None:
    row = noted(EMPTY, 7, "worker0", used=4, read=8)
    row = noted(row, 9, "worker1", used=4, read=4)
    row = noted(row, 7, "worker0", used=4, read=13)
    assert len(row) == ROW
    assert set(readers_in(row)) == {ReadBy(7, "worker0", 8, 13), ReadBy(9, "worker1", 4, 4)}


def test_the_rows_of_replicas_add_up_and_the_same_name_come_back_is_somebody_new() -> None:
    first = noted(EMPTY, 7, "worker0", used=4, read=9)
    second = noted(noted(EMPTY, 7, "worker0", used=2, read=8), 5, "worker0", used=6, read=6)
    ledger = ledger_of([first, second])
    assert ledger == [ReadBy(5, "worker0", 6, 6), ReadBy(7, "worker0", 6, 9)]
    known = "(as of their last contributions)"  # who was killed may have read more
    assert sentence_of(ledger) == f"12 samples used; read and not used: 3 by worker0 {known}"
    assert sentence_of(ledger[:1]) == "6 samples used; read and not used: none"


def test_of_more_processes_than_a_row_has_room_for_the_first_ones_are_counted_together() -> None:
    row = EMPTY
    for key in range(2, READERS + 7):
        row = noted(row, key, f"w{key}", used=key, read=key + 1)
    found = readers_in(row)
    assert len(found) == READERS
    assert found[0].name == "earlier workers"
    assert sum(one.used for one in found) == sum(range(2, READERS + 7))


def test_what_is_lost_of_a_process_that_one_row_has_no_room_for_is_told_as_an_upper_bound() -> None:
    both = noted(EMPTY, 2, "D", used=500, read=1000)
    assert sentence_of(ledger_of([both, both])) == "1,000 samples used; read and not used: none"
    full = both
    for key in range(3, READERS + 3):
        full = noted(full, key, f"w{key}", used=1, read=1)
    assert sentence_of(ledger_of([full, both])).endswith("at most 500 by D (as of their last contributions)")


def test_long_names_and_letters_of_all_alphabets_come_back() -> None:
    assert [one.name for one in readers_in(noted(EMPTY, 2, "työntekijä-7", used=1, read=1))] == ["työntekijä-7"]
    (long,) = readers_in(noted(EMPTY, 2, "x" * 40, used=1, read=1))
    assert long.name == "x" * 24
