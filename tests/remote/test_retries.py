"""How often, how long and for whom something is tried again, without any network."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from ckptcore.storage import retry
from ckptcore.storage.retry import Retries


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    monkeypatch.setattr(retry, "FIRST_PAUSE", 1e-4)
    monkeypatch.setattr(retry, "LONGEST_PAUSE", 1e-3)


def failing(times, error=ConnectionResetError):
    """A call that fails so many times, then answers how often it was made."""
    made = []

    def call():
        made.append(1)
        if len(made) <= times:
            raise error("lost")
        return len(made)

    async def call_async():
        await asyncio.sleep(0)
        return call()

    return call, call_async


def run(retries, calls, background):
    call, call_async = calls
    return asyncio.run(retries.run_async(call_async)) if background else retries.run(call)


@pytest.mark.parametrize("background", [False, True])
def test_what_may_pass_is_tried_until_it_does(background):
    retries = Retries(30)
    assert run(retries, failing(5), background) == 6
    assert retries.count == 5
    assert not retries.dead


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("error", [FileNotFoundError, ValueError])
def test_what_will_not_pass_is_tried_once(background, error):
    retries = Retries(30)
    with pytest.raises(error) as caught:
        run(retries, failing(5, error), background)
    assert retries.count == 0
    assert not hasattr(caught.value, "__notes__")


@pytest.mark.parametrize("background", [False, True])
def test_a_dead_storage_is_noticed_once_until_it_answers(background):
    retries = Retries(0.05)
    with pytest.raises(ConnectionResetError) as caught:
        run(retries, failing(10**6), background)
    assert caught.value.__notes__[0].startswith(f"given up after {retries.count + 1} tries in 0.")
    retries._failing_since -= 1  # the last failure may have been just before the deadline
    assert retries.dead
    before = retries.count
    with pytest.raises(ConnectionResetError) as caught:
        run(retries, failing(1), background)
    assert caught.value.__notes__ == ["given up after 1 try"]
    assert retries.count == before
    with pytest.raises(FileNotFoundError):
        run(retries, failing(1, FileNotFoundError), background)
    assert not retries.dead
    assert run(retries, failing(1), background) == 2


def test_operations_side_by_side_are_counted_apart():
    retries = Retries(30)

    async def all_of_them():
        return await asyncio.gather(*(retries.run_async(failing(n)[1]) for n in range(20)))

    with ThreadPoolExecutor(4) as pool:
        threads = [pool.submit(retries.run, failing(n)[0]) for n in range(20)]
        assert asyncio.run(all_of_them()) == list(range(1, 21))
        assert [thread.result() for thread in threads] == list(range(1, 21))
    assert retries.count == 2 * sum(range(20))


def test_what_is_cancelled_is_not_tried_again():
    """Not even where a lost connection was being dealt with at that moment."""
    retries, made = Retries(30), []

    async def lost():
        made.append(1)
        try:
            raise ConnectionResetError("lost")
        except ConnectionResetError:
            await asyncio.sleep(60)

    async def cancelled():
        task = asyncio.ensure_future(retries.run_async(lost))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert (len(made), retries.count) == (1, 0)
