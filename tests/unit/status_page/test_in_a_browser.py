"""The page in a real browser: it logs in by a link, shows a job by its own script, and takes nothing of a job for HTML."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest

from tests.unit.status.jobs import (
    BEGAN,
    comes,
    end,
    fault,
    incident,
    inputs,
    job_status,
    journal,
    rank_status,
    report,
    start,
)
from tests.unit.status_page.browser import PROGRAM, WITHOUT, dom, screenshot
from tests.unit.status_page.live_page import get
from tests.waiting import LONG_S
from ttp.errors import ConfigError
from ttp.identity.secret import Secret
from ttp.proto.messages import Cause, CauseKind
from ttp.status import page_access
from ttp.status.answer import JobView, StragglerRow
from ttp.status.ask import Reply
from ttp.status.find_job import Job
from ttp.status.look import look
from ttp.status.page_access import Access, PagePlace
from ttp.status_page.curve import PaceCurve
from ttp.status_page.html import PAGE
from ttp.status_page.http_server import PageServer
from ttp.status_page.looks import Looks

HOSTILE = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"


class Served:
    """A page of a job that the test makes up."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.view = job_at(folder / "log")
        self.looks = Looks(lambda: self.view, clock=lambda: 0.0)
        (folder / "token").write_text("0123456789abcdef0123456789abcdef")
        (folder / "token").chmod(0o600)
        token = Secret(b"0123456789abcdef0123456789abcdef")
        self.server = PageServer(("127.0.0.1", 0), self.looks.answers, Access(token, "started", time.time))
        self.place = PagePlace(f"http://127.0.0.1:{self.server.port}/", "h", 1, "started", str(folder / "token"))

    def look(self, count: int = 3, losses: Sequence[float | None] = (3.0, 2.5, 2.25)) -> None:
        for number in range(count):
            loss = losses[number]
            self.view = replace(
                self.view, unix_s=self.view.unix_s + 2, step=(self.view.step or 0) + 4, step_s=0.5 + number / 10, loss=loss,
                loss_finite=loss is not None,
            )  # fmt: skip
            self.looks.look_once()

    @property
    def link(self) -> str:
        return page_access.login_link(self.place, time.time())


def job_at(log_dir: Path) -> JobView:
    """A job in its second attempt, whose first fault has two stages."""
    shown = {
        "world_size": 2, "groups": 1, "survives": "any 1 of 2 ranks", "standbys": [], "warnings": [],
        "rows": [{"ranks": str(rank), "host": f"n{rank}", "shards": ["all 1/2"], "also_on": [f"rank {1 - rank}"]} for rank in range(2)],
    }  # fmt: skip
    journal(log_dir, 0, *comes(0.0), incident(9.0, 1.0, 8))
    second = [event for event in comes(12.0) if event[1] != "assembled"]
    end_s, name, fields = incident(30.0, 2.0, 12)
    stages = {
        **fields,
        "took_ms": {"seen": 500.0, "frozen": 250.0, "written": 1250.0, "total": 2000.0},
        "in_place": True,
        "saved": None,
    }
    journal(log_dir, 1, *second, (13.0, "assembled", shown), (end_s, name, stages))
    (log_dir / "times_1.jsonl").write_text(
        f'{{"unix_s": {BEGAN + 37.0}, "event": "stepped", "step": 13, "took_s": 0.0}}\n'
    )
    inputs(log_dir, 1, "n0:5/10001")
    lost = {**fault(0, 8.0, None, lost=3)[2], "not_saved": HOSTILE, "culprits": [{"rank": 1, "cause": HOSTILE}]}
    sick = (13.5, "sick_node", {"start": 1, "node": "n7", "reason": f"memory: errors {HOSTILE}"})
    report(log_dir, start(0, 1.0), (8.6, "fault", lost), start(1, 13.0), sick)
    ranks = [rank_status(0), rank_status(1, host=HOSTILE, cause=Cause(CauseKind.EXCEPTION, (1,), HOSTILE))]
    reply = Reply(job_status(ranks, job_id=f"{HOSTILE}/1", survives=HOSTILE), HOSTILE)
    return look(Job(log_dir), all_ranks=True, clock=lambda: BEGAN + 40.0, ask_at=lambda address, job_id: reply)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    made = Served(tmp_path)
    with made.server as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield made
        server.shutdown()
        thread.join(LONG_S)


@pytest.mark.skipif(PROGRAM is None, reason=WITHOUT)
def test_a_browser_logs_in_and_shows_the_job(served: Served, tmp_path: Path) -> None:
    """All of it: the tiles, both curves, the stages of a fault, ranks, holders; and a host's name as it is written."""
    served.look()
    found = dom(tmp_path, served.link)
    text = unescape(re.sub(r"<[^>]+>", "\n", re.sub(r"(?s)<(script|style)>.*?</\1>", "", found)))
    assert "<title>training: step 19</title>" in found, found[:500]
    for words in ("running", "/1, 2 ranks", "700 ms a step", "continued in place", "exited: signal SIGKILL", "3 steps lost",
                  "seen 500 ms, frozen 250 ms, written 1.3 s, restarted 7.0 s", "each shard on 2 live ranks or more", "all 1/2", "rank 1"):  # fmt: skip
        assert words in text, words
    assert len(re.findall(r"<polyline [^>]*points=\"[\d., ]+\"", found)) == 3
    assert "not compared: fewer than two ranks report their own time of a step" in text
    assert "no rank is slower" not in text
    sick = found[found.index('<div id="sick">') : found.index('<div id="faults">')]
    cells = unescape(re.sub(r"(?:<[^>]+>)+", "\n", sick)).split("\n")
    assert cells[1:5] == ["node", "why its health check failed", "n7", f"memory: errors {HOSTILE}"]
    assert len(re.findall(r'<rect [^>]*class="(?:seen|frozen|written|restarted)"', found)) == 4
    assert text.count(HOSTILE) >= 7 and found.count("<img") == 0 and found.count("<script>") == 1


@pytest.mark.skipif(PROGRAM is None, reason=WITHOUT)
def test_losses_that_are_not_finite_are_a_gap_and_slow_ranks_and_lost_time_are_shown(
    served: Served, tmp_path: Path
) -> None:
    """The curve goes on behind it; a goodput that is not certain is an upper bound; the parts of the bar are those of the text."""
    use = served.view.time_use
    assert use is not None
    slow = StragglerRow(1, HOSTILE, 1.234, 0.1234, 0.1, 60)
    rows = [
        replace(row, own_s=0.25, waited_s=0.125, slower=1.234 if row.rank == 1 else None) for row in served.view.ranks
    ]
    served.view = replace(served.view, time_use=replace(use, certain=False), goodput=None, stragglers=[slow], ranks=rows)  # fmt: skip
    served.look(7, [3.0, 2.5, None, None, 2.0, 1.5, None])
    found = dom(tmp_path, served.link)
    text = unescape(re.sub(r"<[^>]+>", "\n", re.sub(r"(?s)<(script|style)>.*?</\1>", "", found)))
    loss = found[found.index('<div id="loss">') : found.index('<div id="steps">')]
    assert [points.count(",") for points in re.findall(r'<polyline [^>]*points="([\d., ]+)"', loss)] == [2, 2], loss
    (share,) = set(re.findall(r"at most ([\d.]+) %", text))
    assert float(share) == pytest.approx(100 * use.share, abs=0.06)
    for words in (
        "not finite",
        "1.23",
        "123 ms",
        "60 steps",
        "250 ms",
        "125 ms",
        "new steps at most",
        "3 steps trained again",
    ):
        assert words in text, (words, text)
    parts = {part for part, rank_s in use.rank_s.items() if rank_s > 0}
    bar = found[found.index('<div id="use">') : found.index('class="legend"')]
    drawn = {
        name: float(width)
        for width, name in re.findall(r'<rect x="[\d.]+" width="([\d.]+)"[^>]*class="part (\w+)"', bar)
    }
    assert drawn.keys() == parts and sum(drawn.values()) == pytest.approx(1000), bar
    assert drawn["steps"] == pytest.approx(1000 * use.share) and found.count("<img") == 0


@pytest.mark.skipif(PROGRAM is None, reason=WITHOUT)
@pytest.mark.parametrize(
    ("compared", "says"),
    [(True, "no rank is slower than the others"), (None, "not known, as no step's time is")],
)
def test_the_page_says_whether_ranks_are_compared(
    served: Served, tmp_path: Path, compared: bool | None, says: str
) -> None:
    served.view = replace(served.view, stragglers_compared=compared)
    served.looks.look_once()
    found = dom(tmp_path, served.link)
    slow = found[found.index('<div id="stragglers">') : found.index('<div id="sick">')]
    assert says in unescape(slow)


@pytest.mark.skipif(PROGRAM is None, reason=WITHOUT)
def test_a_job_that_has_ended_shows_its_ranks_and_a_mean_time_of_a_step(served: Served, tmp_path: Path) -> None:
    report(served.folder / "log", end(39.0, 20, 20))
    served.view = replace(look(Job(served.folder / "log"), all_ranks=True), step_s=0.25)
    served.looks.look_once()
    found = dom(tmp_path, served.link)
    assert "<title>ended: step 20</title>" in found and "250 ms a step on average" in found
    ranks = found[found.index('<div id="ranks">') : found.index('<div id="holders">')]
    assert re.findall(r'<span class="ended">ended</span>', ranks) and "n1" in ranks


@pytest.mark.long
@pytest.mark.skipif(PROGRAM is None, reason=WITHOUT)
def test_a_screenshot_has_colours(served: Served, tmp_path: Path) -> None:
    """So the style is taken, which the page's own policy could have refused."""
    from PIL import Image

    served.look()
    screenshot(tmp_path, served.link, tmp_path / "page.png", 1000, 1600)
    with Image.open(tmp_path / "page.png") as image:
        colours = {colour for _, colour in image.convert("RGB").getcolors(1 << 24) or ()}
    assert image.size == (1000, 1600) and {(0x2F, 0x6F, 0xDE), (0x1A, 0x87, 0x54), (0xD9, 0x82, 0x2B)} <= colours


def test_the_page_loads_nothing_from_anywhere(served: Served) -> None:
    """No address but its own, and a policy by which a browser would refuse one."""
    text = PAGE.read_text()
    assert set(re.findall(r"https?://[^\s\"'`<>]+", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|Function\(|\bon\w+=|src=", text
    )
    served.look()
    first = get(served.place, "/" + served.link.removeprefix(served.place.url))
    cookie = first.headers["set-cookie"].partition(";")[0]
    page = get(served.place, "/", Cookie=cookie)
    policy = dict(part.strip().split(" ", 1) for part in page.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'" and policy["connect-src"] == "'self'"
    assert policy["script-src"].startswith("'sha256-") and "unsafe" not in str(policy)


def test_looks_take_at_most_a_tenth_of_a_core(served: Served) -> None:
    """However often the page is asked, and however large the job is; a look that fails leaves the answers of the one before."""
    spent, waited = iter([0.0, 0.05, 1.0, 1.5, 2.0, 2.1]), list[float]()
    looks: list[JobView | ConfigError] = [served.view, served.view, ConfigError("no controller answers")]

    def look_at() -> JobView:
        found = looks[len(waited)]
        if isinstance(found, ConfigError):
            raise found
        return found

    def wait(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 3:
            raise InterruptedError

    made = Looks(look_at, wait, lambda: next(spent))
    assert made.answers().keys() == {"/"}
    with pytest.raises(InterruptedError):
        made.run()
    assert waited == [2.0, pytest.approx(5.0), 2.0] and made.answers().keys() == {"/", "/status.json", "/metrics"}


def test_the_curve_has_a_bounded_number_of_points(served: Served) -> None:
    """Of a long run half of them go, again and again; the first and the newest are near the ends. What files alone know has none."""
    curve = PaceCurve()
    curve.add(replace(served.view, source="files", step=10**9))
    for step in range(1, 5001):
        curve.add(replace(served.view, unix_s=BEGAN + step, step=step))
    fields = curve.fields()
    assert 300 <= len(fields["step"]) < 600 and len(fields["unix_s"]) == len(fields["step_s"]) == len(fields["step"])
    assert fields["step"] == sorted(fields["step"]) and fields["step"][0] < 50 and fields["step"][-1] > 4950
