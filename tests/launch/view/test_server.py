"""The page in a real browser, and requests that a page of others may send."""

import asyncio
import contextlib
import json
import threading
import urllib.error
import urllib.request

import pytest

from launch.http import http_server
from launch.view import runs, server
from tests.helpers import commands, machine_speed, viewed_runs

pytestmark = pytest.mark.process


@contextlib.contextmanager
def served(root):
  """Yields the address of a view over a directory, in a thread of its own."""
  ready, address = threading.Event(), []
  loop = asyncio.new_event_loop()
  stopping = asyncio.Event()

  async def serve():
    view = server.View(root)
    try:
      async with http_server.listening(
        view, http_server.bind(), grace_s=1
      ) as url:
        address.append(url)
        ready.set()
        await stopping.wait()
    finally:
      view.close()

  thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
  thread.start()
  try:
    assert ready.wait(machine_speed.scaled(60))
    yield address[0]
  finally:
    loop.call_soon_threadsafe(stopping.set)
    thread.join(machine_speed.scaled(60))
    loop.close()


@contextlib.contextmanager
def shown(root, browser):
  """As `served`, for a browser that has left the page when the server ends."""
  with served(root) as url:
    try:
      yield url
    finally:
      browser.leave()


@pytest.fixture(scope="module")
def root(tmp_path_factory):
  """Four runs: two settings with two seeds each; the first is played more."""
  root = tmp_path_factory.mktemp("runs")
  for rate in (1, 2):
    for seed in (0, 1):
      path = viewed_runs.run(
        root / f"rate{rate}" / f"seed{seed}",
        level=0.1 * rate + 0.01 * seed,
        seed=seed,
        optimizer={"rate": rate},
      )
  path = root / "rate1" / "seed0"
  for number in (1, 3):
    viewed_runs.write_round(
      path,
      number,
      [
        viewed_runs.trajectory(group, index, task_id=f"game/train/{group % 4}")
        for group in range(4 * number, 4 * number + 4)
        for index in range(2)
      ],
    )
  return root


@pytest.fixture(scope="module")
def address(root):
  with served(root) as url:
    yield url


RUN = "#run?name=rate1%2Fseed0"


def get(url, **headers):
  request = urllib.request.Request(url, headers=headers)
  try:
    with urllib.request.urlopen(
      request, timeout=machine_speed.scaled(60)
    ) as reply:
      return reply.status, reply.read(), reply.headers
  except urllib.error.HTTPError as error:
    with error:
      return error.code, error.read(), error.headers


# ---- The table of runs.


def test_all_runs_stand_in_a_table_with_the_settings_that_differ(
  address, browser
):
  browser.open(address)
  assert browser.values("tbody tr", "data-run") == [
    f"rate{rate}/seed{seed}" for rate in (1, 2) for seed in (0, 1)
  ]
  heads = browser.text("thead").split()
  assert "seed" in heads
  assert "optimizer.rate" in heads
  # Rounds 1 to 4 at 0.2 to 0.5: their mean is 0.35.
  row = browser.text("[data-run='rate1/seed0']").split()
  assert row == [
    "rate1/seed0",
    "ended",
    "4",
    "/",
    "4",
    "0.35",
    "0.35",
    "0",
    "1",
  ]


def test_a_curve_is_a_line_for_all_seeds_with_a_band(address, browser):
  browser.open(address)
  assert browser.count("#curves .curve") == 2
  assert browser.count("#curves .band") == 2
  assert "optimizer.rate=1 (2 runs)" in browser.text("#curves .legend")
  told = browser.do("document.querySelector('#curves svg').textContent")
  assert "1234rounds" in told  # There is no round 1.5.
  browser.click("#bands")
  assert browser.count("#curves .curve") == 4
  assert browser.count("#curves .band") == 0
  for axis in ("tokens", "time"):
    browser.choose("#axis", axis)
    assert browser.count("#curves .curve") == 4
  browser.choose("#metric", "entropy")
  browser.wait("document.querySelector('[aria-label^=\"entropy\"]') !== null")


def test_runs_that_are_not_listed_are_counted(tmp_path, browser, monkeypatch):
  monkeypatch.setattr(runs, "MAX_RUNS", 2)
  for name in "abc":
    viewed_runs.run(tmp_path / name)
  with shown(tmp_path, browser) as url:
    browser.open(url)
    assert browser.count("#runs tbody tr") == 2
    assert "1 more, the last by name" in browser.text("#runs figcaption")


def test_the_legend_tells_all_lines_apart(tmp_path, browser):
  # There are eight colours, and names of groups too long to be shown.
  for group in range(9):
    settings = {letter * 60: group for letter in "ab"}
    for seed in range(2):
      viewed_runs.run(tmp_path / f"{group}_{seed}", seed=seed, **settings)
  with shown(tmp_path, browser) as url:
    browser.open(url)
    names = browser.text("#curves .legend").split("\n")
    keys = browser.do(
      "[...document.querySelectorAll('#curves .key')]"
      ".map((key) => getComputedStyle(key).background)"
    )
  assert names == [f"{group}_0 and 1 more" for group in range(9)]
  assert len({*keys}) == 9


def test_the_line_of_several_seeds_ends_with_the_shortest_run(
  tmp_path, browser
):
  # At 0.1 to 0.4 and at 0.3 and 0.4: the means of both are 0.2 and 0.3.
  viewed_runs.run(tmp_path / "a", 4)
  path = viewed_runs.run(tmp_path / "b", 4, seed=1, level=0.2)
  viewed_runs.write_lines(path / "metrics.jsonl", viewed_runs.metrics(2, 0.2))
  with shown(tmp_path, browser) as url:
    browser.open(url)
    (line,) = browser.values("#curves .curve", "points")
    (rest,) = browser.values("#curves .rest", "points")
  # From its end on the longer one goes on, from round 2 to 4.
  assert len(line.split()) == 2
  at = [point.split(",")[0] for point in rest.split()]
  assert len(at) == 3
  assert at[0] == line.split()[1].split(",")[0]


def test_the_only_round_of_a_run_lies_over_any_number_of_tokens(
  tmp_path, browser
):
  # Steps of 1e-10 would be lost beside 2e6, and never come to an end.
  path = viewed_runs.run(tmp_path / "run", 1)
  row = viewed_runs.metrics(1)[0] | {"sampled_tokens": 2e6}
  viewed_runs.write_lines(path / "metrics.jsonl", [row])
  with shown(path, browser) as url:
    browser.open(url)
    browser.choose("#axis", "tokens")
    assert browser.count("#curves circle") == 1
    assert "2,000,000" in browser.text("#curves figure")


def test_ticked_runs_alone_are_drawn_and_two_can_be_compared(address, browser):
  browser.open(address)
  browser.click("tbody input", 0)
  assert browser.count("#curves .curve") == 1
  assert browser.do("document.querySelector('#compare').disabled")
  browser.click("tbody input", 3)
  assert browser.count("#curves .curve") == 2
  browser.click("#compare")
  browser.wait("document.querySelector('#settings td') !== null")
  assert "#compare?a=rate1%2Fseed0&b=rate2%2Fseed1" in browser.do(
    "location.href"
  )
  settings = browser.text("#settings tbody").split()
  assert settings == ["seed", "0", "1", "optimizer.rate", "1", "2"]
  # Their levels are 0.1 and 0.21.
  (row,) = [
    line.split()
    for line in browser.text("#metrics tbody").split("\n")
    if line.startswith("success")
  ]
  assert row == ["success", "0.35", "0.46", "0.11"]
  browser.click("[data-metric='entropy']")
  assert browser.count("#curves [aria-label^='entropy'] .curve") == 2


def test_columns_sort_and_a_filter_finds_settings(address, browser):
  browser.open(address)
  browser.do("document.querySelectorAll('thead button')[3].focus()")
  browser.press("Enter", "Enter")  # Once more: the best is on top.
  assert browser.values("tbody tr", "data-run")[0] == "rate2/seed1"
  assert browser.values("th[aria-sort]", "aria-sort")[3] == "descending"
  # The button has kept the keyboard, although the table is a new one.
  assert browser.do("document.activeElement.dataset.focus") == "sort last"
  browser.choose("#search", "optimizer.rate=2")
  assert browser.count("tbody tr") == 2


def test_a_run_that_trains_is_drawn_as_it_grows(tmp_path, browser):
  path = viewed_runs.run(tmp_path / "a", 6) / "metrics.jsonl"
  viewed_runs.write_lines(path, viewed_runs.metrics(2))
  with shown(tmp_path, browser) as address:
    browser.open(address)
    assert "2 / 6" in browser.text("tbody")
    browser.click("tbody input")
    viewed_runs.write_lines(path, viewed_runs.metrics(3))
    browser.wait("document.querySelector('tbody').innerText.includes('3 / 6')")
    # What was chosen stays.
    assert browser.do("document.querySelector('tbody input').checked")


# ---- One run.


def test_the_page_of_a_run_has_its_parts(address, browser):
  browser.open(f"{address}/{RUN}")
  assert browser.text("h1") == "seed0"
  # Half of the members are masked: trained, and masked for two reasons at most.
  fates = browser.values("path.flow", "data-fate")
  assert fates[0] == "trained"
  counts = [int(x) for x in browser.values("path.flow", "data-count")]
  assert sum(counts) == browser.do(
    "fetch('api/run?run=rate1/seed0').then((r) => r.json())"
    ".then((d) => d.ledger.sampled)"
  )
  causes = browser.values("rect.bubble", "data-cause")
  assert causes.count("busy") == 2
  assert browser.count("#timeline canvas[data-drawn]") == 1
  assert browser.count("#lags rect.bar")
  assert browser.count("#lengths rect.bar")
  assert browser.text("#groups .legend").split("\n") == [
    "waited for an engine",
    "played",
    "queued for the learner",
    "trained",
    "dropped",
  ]
  assert "Busy: a warm start and what the learner" in browser.text("#bubbles")
  assert browser.count("#faults[hidden]")  # There are none.


def test_faults_stand_by_their_culprit(tmp_path, browser):
  path = viewed_runs.run(tmp_path / "a") / "events.jsonl"
  rows = [json.loads(line) for line in path.read_text().splitlines()]
  place = next(i for i, row in enumerate(rows) if row["kind"] == "reward")
  rows[place] |= {"kind": "fault", "status": "env_fault"}
  rows[place] |= {"what": viewed_runs.EVIL}
  viewed_runs.write_lines(path, rows)
  with shown(tmp_path, browser) as address:
    browser.open(f"{address}/#run?name=a")
    text = browser.text("#faults tbody")
    assert "environment" in text
    assert "<img src=x" in text


def test_a_run_that_is_not_there_is_told_of(address, browser):
  browser.open(f"{address}/#run?name=none")
  assert "there is no run none here" in browser.text("#trouble")
  browser.open(f"{address}/#run?run=first")
  assert browser.text("#trouble") == (
    "#run?run=first names no run; write #run?name=RUN"
  )
  browser.leave()
  # The browser itself tells of nothing but the replies.
  assert {*browser.errors} == {
    "Failed to load resource: the server responded with a status of 404 "
    "(Not Found)"
  }
  browser.errors.clear()


# ---- Trajectories.


def test_filters_find_trajectories(address, browser):
  browser.open(f"{address}/{RUN}")
  assert "16 of the 16 trajectories" in browser.text("#shown")
  browser.choose("[data-filter='round']", "3")
  assert "8 of the 16" in browser.text("#shown")
  browser.choose("[data-filter='reward-least']", "0.5")
  assert "4 of the 16" in browser.text("#shown")
  browser.choose("[data-filter='tokens-most']", "1")
  assert "0 of the 16" in browser.text("#shown")
  assert browser.count("[role='option']") == 0
  browser.click("#clear")
  assert "16 of the 16" in browser.text("#shown")
  # Round 3 trains version 2, and all was sampled by version 0.
  browser.choose("[data-filter='lag']", "2")
  assert "8 of the 16" in browser.text("#shown")
  browser.choose("[data-filter='source']", "game")
  browser.choose("[data-filter='task']", "train/3")
  assert "2 of the 16" in browser.text("#shown")


def test_the_keyboard_walks_through_the_list(address, browser):
  browser.open(f"{address}/{RUN}")
  browser.wait("document.querySelector('#detail h2') !== null")
  browser.do("document.querySelector('[role=listbox]').focus()")
  browser.press("ArrowDown", "ArrowDown")
  browser.wait(
    "document.querySelector('#detail .facts').innerText.startsWith('member 0')"
  )
  assert browser.values("[aria-selected='true']", "data-place") == ["2"]
  assert browser.do("location.hash").endswith("trajectory=1%2F5%2F0")
  browser.press("End")
  assert browser.values("[aria-selected='true']", "aria-posinset") == ["16"]
  browser.press("Home")
  assert browser.values("[aria-selected='true']", "aria-posinset") == ["1"]


def test_a_trajectory_is_shown_turn_by_turn(address, browser):
  browser.open(f"{address}/{RUN}&trajectory=3/13/1")
  browser.wait(
    "document.querySelector('#detail h2')?.innerText === 'game/train/1'"
  )
  facts = browser.text("#detail .facts")
  assert "member 1" in facts
  assert "reward 1" in facts
  assert "lag 2" in facts
  assert browser.text(".turn .words.context").split() == ["<b>", "ask"]
  browser.click("#ids")
  assert browser.text(".turn .words.context").split() == ["1", "2"]
  assert browser.text(".turn > div > .words").split() == ["10", "11"]
  # What the same task did at another round.
  assert "The same task at other rounds: 2" in browser.text(".others summary")
  browser.click(".others summary")
  browser.click(".others .member")
  browser.wait(
    "document.querySelector('#detail .muted')?.innerText"
    ".startsWith('Round 1, group 5')"
  )


def in_view(browser, selector):
  """Returns whether an element lies in the window, and in what it scrolls."""
  return browser.do(
    "((e) => { const box = e?.getBoundingClientRect(), list = e?.closest("
    "'.list')?.getBoundingClientRect() ?? { top: 0, bottom: innerHeight };"
    " return Boolean(box) && box.top >= Math.max(0, list.top - 1) &&"
    " box.top < Math.min(innerHeight, list.bottom); })"
    f"(document.querySelector({json.dumps(selector)}))"
  )


def test_a_trajectory_of_an_address_is_scrolled_to(tmp_path, browser):
  path = viewed_runs.run(tmp_path / "a")
  rows = [viewed_runs.trajectory(k // 2, k % 2) for k in range(100)]
  viewed_runs.write_round(path, 1, rows)
  chosen = "[role='option'][aria-selected='true']"
  with shown(tmp_path, browser) as address:
    browser.open(f"{address}/#run?name=a")
    assert not in_view(browser, "#trajectories")
    browser.open(f"{address}/#run?name=a&trajectory=1/40/1")
    # Its place is 40 * 2 + 1, counted from 0.
    assert browser.values(chosen, "data-place") == ["81"]
    assert in_view(browser, "#trajectories")
    assert in_view(browser, chosen)
    browser.do("location.hash = '#run?name=a&trajectory=1/3/0'")
    browser.wait(f"document.querySelector(\"{chosen}\").dataset.place === '6'")
    assert in_view(browser, chosen)
    # One that is not there is told of, and comes once it is.
    browser.do("location.hash = '#run?name=a&trajectory=2/0/0'")
    browser.wait("document.querySelector('#detail .broken') !== null")
    assert browser.text("#detail") == (
      "There is no trajectory 2/0/0 on this page."
    )
    assert browser.count(chosen) == 0
    viewed_runs.write_round(path, 2, rows)
    browser.wait(
      f"document.querySelector(\"{chosen}\")?.dataset.place === '100'"
    )
    assert in_view(browser, chosen)


def test_the_mask_and_the_colours_of_tokens_are_told_apart(address, browser):
  browser.open(f"{address}/{RUN}&trajectory=1/4/1")
  browser.wait("document.querySelector('#detail .token') !== null")
  style = (
    "getComputedStyle(document.querySelector('.turn > div > .words .token'))"
  )
  colours = {}
  for by in ("logprobs", "advantages", "none"):
    browser.choose("#colour", by)
    colours[by] = browser.do(f"{style}.backgroundColor")
  assert len({*colours.values()}) == 3
  # Once the log is read.
  browser.wait("document.querySelectorAll('.turn.masked').length === 1")
  before = browser.do(f"{style}.opacity")
  browser.click("#mask")
  assert browser.do(f"{style}.opacity") <= before
  assert browser.count(".show-mask") == 1


def test_weights_are_offered_where_tokens_were_scored_again(tmp_path, browser):
  path = viewed_runs.run(tmp_path / "a")
  rows = [viewed_runs.trajectory(0, i) for i in range(2)]
  # Twice as probable, and as probable as when they were sampled.
  rows[1]["turns"][0]["old_logprobs"] = [-0.5 + 0.6931, -0.5]
  viewed_runs.write_round(path, 1, rows)
  with shown(tmp_path, browser) as address:
    browser.open(f"{address}/#run?name=a&trajectory=1/0/1")
    weights = "document.querySelector('#colour [value=weights]')"
    browser.wait(f"{weights}?.disabled === false")
    browser.choose("#colour", "weights")
    tips = browser.values(".turn > div > .words .token", "data-tip")
    assert ["weight 2\n" in tip for tip in tips] == [True, False]
    browser.click("[data-key='1/0/0']")
    browser.wait(f"{weights}.disabled")
    reason = "weight (not scored again)"
    assert browser.do(f"{weights}.text") == reason
    assert browser.do("document.querySelector('#colour').value") == "logprobs"
    # The choice is kept for those that have weights.
    browser.click("[data-key='1/0/1']")
    browser.wait("document.querySelector('#colour').value === 'weights'")


def test_versions_have_hues_where_a_trajectory_spans_several(tmp_path, browser):
  path = viewed_runs.run(tmp_path / "a")
  rows = [viewed_runs.trajectory(0, i) for i in range(2)]
  rows[1]["turns"][0]["versions"] = [3, 4]
  viewed_runs.write_round(path, 1, rows)
  with shown(tmp_path, browser) as address:
    browser.open(f"{address}/#run?name=a&trajectory=1/0/1")
    versions = "document.querySelector('#colour [value=versions]')"
    browser.wait(f"{versions}?.disabled === false")
    browser.choose("#colour", "versions")
    assert browser.text("#detail .legend").split("\n") == [
      "version 3",
      "version 4",
    ]
    old, new = browser.do(
      "[...document.querySelectorAll('.turn > div > .words .token')]"
      ".map((token) => getComputedStyle(token).backgroundColor)"
    )
    assert old != new
    browser.click("[data-key='1/0/0']")
    browser.wait(f"{versions}.disabled")
    assert browser.do(f"{versions}.text") == "version (only one)"
    assert browser.count("#detail .legend") == 0


def test_roles_and_tool_calls_have_parts_of_their_own(tmp_path, browser):
  path = viewed_runs.run(tmp_path / "a")
  row = viewed_runs.trajectory(
    0,
    0,
    words=["<think>", "hm", "</think>", "<tool_call>", "{}", "</tool_call>"],
  )
  row["turns"][0] |= {
    "context": [1, 2, 3, 4, 5, 6],
    "context_words": [
      *("<|im_start|>", "system\n", "be good<|im_end|>"),
      *("<|im_start|>", "user\n", "hello"),
    ],
  }
  viewed_runs.write_round(path, 1, [row])
  with shown(tmp_path, browser) as address:
    browser.open(f"{address}/#run?name=a")
    browser.wait("document.querySelector('#detail .part') !== null")
    kinds = [x.split()[-1] for x in browser.values("#detail .part", "class")]
    assert kinds == ["system", "user", "thought", "call"]
    labels = browser.do(
      "[...document.querySelectorAll('#detail .part > small')]"
      ".map((x) => x.innerText)"
    )
    assert labels == ["system", "user", "thought", "tool call"]
    assert "be good" in browser.text("#detail .part.system")
    assert "be good" not in browser.text("#detail .part.user")


def test_pieces_of_text_have_no_gaps_in_any_turn(tmp_path, browser):
  path = viewed_runs.run(tmp_path / "a")
  row = viewed_runs.trajectory(0, 0, words=["an", "swer"], gap="")
  viewed_runs.write_round(path, 1, [row])
  with shown(tmp_path, browser) as address:
    browser.open(f"{address}/#run?name=a")
    browser.wait("document.querySelector('#detail .turn') !== null")
    assert browser.text(".turn > div > .words") == "answer"


def test_a_token_that_holds_two_marks_is_drawn_once(tmp_path, browser):
  path = viewed_runs.run(tmp_path / "a")
  words = ["<", "think", ">", "hm", "</", "think", "><", "tool", "_call", ">"]
  row = viewed_runs.trajectory(0, 0, words=words, gap="")
  viewed_runs.write_round(path, 1, [row])
  with shown(tmp_path, browser) as address:
    browser.open(f"{address}/#run?name=a")
    browser.wait("document.querySelector('#detail .part') !== null")
    assert browser.count(".turn > div > .words .token") == len(words)


def test_hostile_text_stays_text(tmp_path, browser):
  evil = viewed_runs.EVIL
  path = viewed_runs.run(tmp_path / "a", note=evil)
  viewed_runs.run(tmp_path / "b")
  row = viewed_runs.trajectory(
    0,
    0,
    words=[evil, "javascript:alert(1)"],
    task_id=evil,
    fault=evil,
    status=evil,
    parts={evil: 1.0},
  )
  viewed_runs.write_round(path, 1, [row])
  with (path / "metrics.jsonl").open("a") as file:
    file.write(json.dumps({"round": 5, evil: 1.0}) + "\n")
  with shown(tmp_path, browser) as address:
    for where in ("", "#compare?a=a&b=b", "#run?name=a"):
      browser.open(f"{address}/{where}")
      if where.startswith("#run"):
        browser.wait("document.querySelector('#detail .token') !== null")
        assert "<img src=x" in browser.text("#detail")
      assert browser.count("img") == 0
      assert browser.do("document.body.dataset.hurt ?? ''") == ""


@pytest.mark.slow
def test_of_20_000_trajectories_only_rows_in_view_are_drawn(tmp_path, browser):
  path = viewed_runs.run(tmp_path / "a")
  for number in range(20):
    viewed_runs.write_round(
      path,
      1 + number,
      [viewed_runs.trajectory(k // 8, k % 8) for k in range(1000)],
    )
  with shown(tmp_path, browser) as address:
    browser.open(f"{address}/#run?name=a")
    assert "20000 of the 20000" in browser.text("#shown")
    browser.do("document.querySelector('[role=listbox]').focus()")
    for key, place in (("End", 20_000), ("PageUp", None), ("Home", 1)):
      browser.press(key)
      assert browser.count("[role='option']") < 60
      found = browser.values("[aria-selected='true']", "aria-posinset")
      assert found == [str(place)] or place is None
    browser.choose("[data-filter='round']", "20")
    browser.choose("[data-filter='reward-least']", "1")
    assert "500 of the 20000" in browser.text("#shown")
    assert browser.count("[role='option']") < 60


def test_a_long_answer_is_drawn_in_steps(tmp_path, browser):
  path = viewed_runs.run(tmp_path / "a")
  row = viewed_runs.trajectory(0, 0, words=["la "] * 7000)
  viewed_runs.write_round(path, 1, [row])
  with shown(tmp_path, browser) as address:
    browser.open(f"{address}/#run?name=a")
    browser.wait("document.querySelector('#detail .more') !== null")
    for count in (6000, 7000):
      browser.click("#detail .more")
      assert browser.count("#detail .words:not(.context) .token") == count
    assert browser.count("#detail .more") == 0


# ---- How it looks.


@pytest.mark.parametrize("where", ["", "#compare?", RUN])
@pytest.mark.parametrize("width", [360, 1280])
def test_no_window_is_too_narrow(address, browser, where, width):
  browser.look(width=width, height=800)
  browser.open(f"{address}/{where}")
  assert browser.do("document.documentElement.scrollWidth") <= width


def test_dark_pages_have_dark_paper_and_light_ink(address, browser):
  def brightness(of):
    text = browser.do(f"getComputedStyle(document.body).{of}")
    return sum(map(int, text.strip("rgb()").split(",")))

  browser.open(f"{address}/{RUN}")
  assert brightness("backgroundColor") > 600 > brightness("color")
  browser.look(dark=True)
  assert brightness("backgroundColor") < 150 < 450 < brightness("color")


def test_every_control_is_reached_by_tab_and_seen(address, browser):
  browser.open(address)
  seen = []
  for _ in range(12):
    browser.press("Tab")
    seen.append(
      browser.do(
        "document.activeElement.id || document.activeElement"
        ".dataset.focus || document.activeElement.tagName"
      )
    )
    width = browser.do("getComputedStyle(document.activeElement).outlineWidth")
    assert width != "0px", seen
  assert {"metric", "axis", "bands", "search", "sort name"} <= {*seen}


def test_arrow_keys_walk_along_a_curve_and_tell_its_values(address, browser):
  browser.open(address)
  browser.do("document.querySelector('#curves .chart').focus()")
  browser.press("Home")
  assert "rounds 1\n" in browser.text("#tip")
  browser.press("ArrowRight")
  assert "rounds 2\n" in browser.text("#tip")
  assert browser.text("#said") == browser.text("#tip")
  browser.press("Escape")
  assert browser.do("document.querySelector('#tip').hidden")


# ---- Requests.


def test_other_names_and_other_pages_are_refused(address):
  assert get(address)[0] == 200
  for headers in (
    {"Host": "evil.example"},
    {"Origin": "https://evil.example"},
    {"Origin": "null"},
  ):
    status, body, found = get(f"{address}/api/runs", **headers)
    assert status in (403, 421)
    assert b"rate1" not in body
    assert "default-src 'none'" in found["content-security-policy"]


@pytest.mark.parametrize(
  ("path", "status"),
  [
    ("../setup.py", 404),
    ("%2e%2e/setup.py", 404),
    ("server.py", 404),
    ("api/nothing", 404),
    ("api/run", 400),
    ("api/run?run=..", 404),
    ("api/run?run=rate1", 404),
    ("api/run?run=/etc", 404),
    ("api/trajectory?run=rate1/seed0&round=1&offset=-1", 400),
    ("api/trajectory?run=rate1/seed0&round=1&offset=" + "9" * 99, 400),
    ("api/trajectory?run=rate1/seed0&round=1&offset=7", 404),
    ("api/trajectory?run=rate1/seed0&round=2&offset=0", 404),
  ],
)
def test_nothing_else_can_be_asked_for(address, path, status):
  found, body, _ = get(f"{address}/{path}")
  assert found == status
  assert b"Traceback" not in body


def test_what_has_not_changed_is_not_sent_again(address):
  _, _, headers = get(f"{address}/api/runs")
  status, body, _ = get(
    f"{address}/api/runs", **{"If-None-Match": headers["etag"]}
  )
  assert (status, body) == (304, b"")


def test_nothing_is_written(address, root):
  before = sorted(root.rglob("*"))
  for path in ("runs", "curves?metric=success", "run?run=rate1/seed0"):
    assert get(f"{address}/api/{path}")[0] == 200
  assert sorted(root.rglob("*")) == before


# ---- The command.


def test_the_command_serves_until_it_is_ended(root):
  with commands.start("launch.view", root, "--port=0") as process:
    assert process.stdout is not None
    told = process.stdout.readline()
    assert f" the runs of {root} are shown at http://127.0.0.1:" in told
    assert get(told.split()[-1])[0] == 200
    process.terminate()
    assert process.wait(machine_speed.scaled(60)) == 0


@pytest.mark.parametrize(
  ("arguments", "told"),
  [
    ((), "name one directory of runs"),
    (("a", "b"), "name one directory of runs"),
    (("nowhere",), "nowhere is not a directory; name the parent"),
  ],
)
def test_a_directory_that_cannot_be_shown_is_refused(arguments, told):
  done = commands.run("launch.view.__main__", *arguments)
  assert done.returncode == 2
  assert told in done.stderr
