// The list of episodes, its filters and keys, and the episode that is open.

const BROWSER = { open: () => {} };
const ROW = 54; // px, as in the style
const BESIDE = RUN.beside?.length > 0;
const runName = (t) => (BESIDE ? (t.run ? "B · " : "A · ") : "");
const setName = (t) =>
  runName(t) + (t.set === "train" ? `step ${t.step}` : (NAMES[t.set] ?? t.set) + (t.step ? ` ${t.step}` : ""));
const setKey = (t) => (t.step ? `${t.set} ${t.step}` : t.set);
const family = (t) => JSON.stringify([t.family ?? [t.set, t.step, t.group], t.role]);
// With every episode at hand a task is met again at other steps and in the run beside; else before and after.
const sameTask = (t) =>
  RUN.live ? JSON.stringify([t.task, t.seed, t.role]) : t.set !== "train" && JSON.stringify([t.group, t.rollout, t.role]);

function index(map, list, key, from = 0) {
  for (let i = from; i < list.length; i++) {
    const name = key(list[i]);
    if (map.has(name)) map.get(name).push(i);
    else map.set(name, [i]);
  }
  return map;
}

function drawDetail(i, families, tasks, surprise, pin) {
  const t = ALL[i];
  const siblings = families.get(family(t)),
    others = sameTask(t) ? tasks.get(sameTask(t)) : [];
  const most = Math.max(0, ...siblings.flatMap((j) => (ALL[j].turns ?? []).map((turn) => Math.abs(turn.advantage ?? 0))));
  const chips = (name, list) => {
    const buttons = list.map(([j, label]) => {
      const button = el(
        "button",
        { type: "button", "aria-current": String(i === j) },
        el("span", { class: tone(ALL[j]) }, "● "),
        visible(label),
      );
      button.addEventListener("click", () => BROWSER.open(j));
      return button;
    });
    return list.length > 1 ? el("div", { class: "chips small" }, el("span", { class: "soft" }, name), buttons) : null;
  };
  const facts = [
    setName(t),
    t.difficulty,
    `reward ${number(t.reward)}`,
    stopName(t.stop),
    plural(t.length?.[0] ?? t.turns.length, "turn"),
    plural(t.length?.[1] ?? t.tokens.length, "token"),
    duration(t.seconds),
    t.attempts > 1 ? `attempt ${t.attempts}` : "",
    `seed ${t.seed}`,
    t.role === "agent" ? "" : t.role,
  ]
    .filter(Boolean)
    .map(visible);
  return [
    el(
      "div",
      { class: "row spread" },
      el("h3", {}, visible(t.task)),
      el("span", { class: "row" }, el("strong", { class: tone(t) }, outcome(t)), pin),
    ),
    el("p", { class: "soft small" }, facts.join(" · ")),
    t.bad?.length ? el("p", { class: "fault small" }, t.bad.join(" · ")) : null,
    drawSeparation(t),
    t.error ? el("p", { class: "fault small" }, visible(t.error)) : null,
    chips(
      `group ${visible(t.group)}`,
      siblings.map((j) => [j, number(ALL[j].reward)]),
    ),
    chips("same task", elsewhere(others, i)),
    ...(t.tokens ? drawFlow(t, most, surprise) : [el("p", { class: "soft small" }, "…")]),
  ].filter(Boolean);
}

// The same task elsewhere: with every episode at hand one for each step and run, if it can be of the same place in its group.
function elsewhere(list, i) {
  if (!RUN.live) return list.map((j) => [j, setName(ALL[j])]);
  const sets = index(new Map(), list, (j) => setName(ALL[j]));
  return [...sets].map(([name, places]) => {
    const members = places.map((place) => list[place]),
      solved = members.filter((j) => ALL[j].solved).length;
    const j = members.includes(i) ? i : (members.find((k) => ALL[k].rollout === ALL[i].rollout) ?? members[0]);
    return [j, `${name}: ${solved} of ${members.length}`];
  });
}

// What winners of the episode's group did more, or less, than its losers.
function drawSeparation(t) {
  const facts = RUN.groups?.[t.family];
  if (!facts) return null;
  const told = facts.map(
    ({ fact, winners, losers, chance }) =>
      `${visible(fact)}: winners ${number(winners)}, losers ${number(losers)}${chance % 1 ? "" : ", without exception"}`,
  );
  return el("p", { class: "small separation" }, el("span", { class: "soft" }, "What separated this group: "), told.join(" · "));
}

// A choice among what there is, which may become more.
function drawChoice(label, values) {
  const field = el("select", { "aria-label": label }, el("option", { value: "" }, label)),
    there = new Set();
  const grow = () => {
    for (const [value, text] of values())
      if (!there.has(value)) {
        there.add(value);
        field.append(el("option", { value }, visible(text)));
      }
  };
  grow();
  return { field, grow };
}

// The filters: their elements, whether a trajectory passes, and how to let all pass.
function drawFilters(changed) {
  const unique = (key) => [...new Set(ALL.map(key))].filter(Boolean).sort(natural);
  const named = (values) => values.map((value) => [value, value.replaceAll("_", " ")]);
  const sets = drawChoice("all sets", () => {
    const found = new Map(ALL.map((t) => [setKey(t), t])),
      several = [...new Set(ALL.filter((t) => t.step).map((t) => t.set))];
    const whole = several.map((set) => [set, set === "train" ? "all training steps" : `all of ${set}`]);
    const each = [...found].sort(([a], [b]) => natural(a, b)).map(([key, t]) => [key, setName(t).replace(/^[AB] · /, "")]);
    return [...each.filter(([key]) => NAMES[key]), ...whole, ...each.filter(([key]) => !NAMES[key])];
  });
  const results = drawChoice("any result", () => [
    ["solved", "solved"],
    ["failed", "failed"],
    ["broken, not counted", "broken"],
  ]);
  const stops = drawChoice("any stop", () => named(unique((t) => t.stop)));
  const levels = drawChoice("any difficulty", () => unique((t) => t.difficulty).map((name) => [name, name]));
  const bad = drawChoice("any case", () => Object.keys(RUN.kinds ?? {}).map((name) => [name, name]));
  const runs = drawChoice("both runs", () => [
    ["0", "A"],
    ["1", "B"],
  ]);
  const search = el("input", { type: "search", placeholder: "search in text, calls, reasons", "aria-label": "search" });
  const choices = [BESIDE ? runs : null, sets, results, stops, levels, RUN.live ? bad : null].filter(Boolean);
  const fields = [...choices.map(({ field }) => field), search];
  for (const field of fields) field.addEventListener("input", () => changed());
  const test = () => {
    const [run, set, result, stop, level, kind, text] = [runs, sets, results, stops, levels, bad, { field: search }].map(
      ({ field }) => field.value,
    );
    const low = text.toLowerCase();
    return (t) =>
      (!run || run === String(t.run)) &&
      (!set || set === t.set || set === setKey(t)) &&
      (!result || result === outcome(t)) &&
      (!stop || stop === t.stop) &&
      (!level || level === t.difficulty) &&
      (!kind || t.bad.includes(kind)) &&
      (!low || plain(t).includes(low));
  };
  return {
    fields,
    test,
    search,
    bad: bad.field,
    sets: sets.field,
    runs: runs.field,
    grow: () => choices.forEach((choice) => choice.grow()),
    clear: () =>
      fields.forEach((field) => {
        field.value = "";
      }),
  };
}

function drawRow(j, place, count, chosen) {
  const t = ALL[j];
  const row = el(
    "div",
    {
      role: "option",
      id: "episode" + j,
      class: !t.counts ? "void" : t.solved ? "solved" : "",
      "aria-selected": String(chosen),
      "aria-posinset": place + 1,
      "aria-setsize": count,
    },
    el("div", {}, el("span", {}, visible(t.task)), el("span", { class: tone(t) }, number(t.reward))),
    el(
      "div",
      { class: "soft small" },
      el("span", {}, `${setName(t)} · ${stopName(t.stop)}`),
      el("span", {}, visible(t.difficulty)),
    ),
  );
  row.style.top = place * ROW + "px";
  row.addEventListener("click", () => BROWSER.open(j));
  return row;
}

function drawBrowser() {
  if (!ALL.length && !RUN.live) return $("#browse").append(el("p", { class: "soft" }, leftOut() || "No episodes stored yet."));
  const families = index(new Map(), ALL, family),
    tasks = index(new Map(), ALL, sameTask),
    surprise = { on: false };
  const filters = drawFilters(() => refresh());
  const count = el("span", { class: "soft small", role: "status" }),
    tall = el("div", { style: "position: relative" });
  const list = el("div", { id: "list", class: "panel", role: "listbox", tabindex: 0, "aria-label": "Episodes" }, tall);
  const detail = el("div", { id: "detail", class: "panel" }),
    held = el("div", { id: "held", class: "panel", hidden: "" });
  let rows = [],
    chosen = -1,
    indexed = ALL.length;
  const paint = () => {
    // only the rows in sight: there may be thousands
    const from = Math.max(0, Math.floor(list.scrollTop / ROW) - 4),
      to = Math.min(rows.length, from + Math.ceil(list.clientHeight / ROW) + 9);
    tall.style.height = rows.length * ROW + "px";
    tall.replaceChildren(...rows.slice(from, to).map((j, k) => drawRow(j, from + k, rows.length, j === chosen)));
  };
  const choose = () => {
    const passes = filters.test();
    rows = [];
    for (let j = 0; j < ALL.length; j++) if (passes(ALL[j])) rows.push(j);
    count.textContent = `${rows.length.toLocaleString("en")} of ${ALL.length.toLocaleString("en")}`;
  };
  const refresh = (keep = chosen) => {
    choose();
    list.scrollTop = 0;
    if (rows.length && !rows.includes(keep)) show(rows[0]);
    paint();
  };
  const put = (box, j, action, press) => {
    const button = RUN.live ? el("button", { type: "button", class: "hint" }, action) : null;
    button?.addEventListener("click", press);
    const draw = () => box.replaceChildren(...drawDetail(j, families, tasks, surprise, button));
    draw();
    if (ALL[j].tokens) return;
    fetchEpisode(j).then(
      () => box.shown === j && draw(),
      (error) => box.shown === j && box.append(el("p", { class: "fault small" }, visible(error.message))),
    );
  };
  const hold = (j) => {
    held.hidden = j === null;
    held.shown = j;
    held.parentNode?.classList.toggle("two", j !== null);
    if (j !== null) put(held, j, "let go", () => hold(null));
  };
  const show = (j) => {
    chosen = detail.shown = j;
    const top = rows.indexOf(j) * ROW;
    if (top < list.scrollTop || top + ROW > list.scrollTop + list.clientHeight)
      list.scrollTop = top - list.clientHeight / 2 + ROW / 2;
    list.setAttribute("aria-activedescendant", "episode" + j);
    paint();
    showTip(null);
    put(detail, j, "hold beside", () => hold(j));
  };
  BROWSER.open = (j) => {
    if (!rows.includes(j)) {
      filters.clear();
      refresh(j);
    }
    show(j);
    const seen = list.getBoundingClientRect();
    if (seen.top > innerHeight * 0.8 || seen.bottom < 0) $("#browse").scrollIntoView();
  };
  BROWSER.grow = () => {
    index(families, ALL, family, indexed);
    index(tasks, ALL, sameTask, indexed);
    indexed = ALL.length;
    filters.grow();
    choose();
    if (chosen < 0 && rows.length) show(rows[0]);
    else paint();
  };
  BROWSER.filter = (kind, t) => {
    filters.clear();
    [filters.bad.value, filters.sets.value, filters.runs.value] = [kind, setKey(t), BESIDE ? String(t.run) : ""];
    refresh(-1);
    $("#browse").scrollIntoView();
  };
  const move = (by) => rows.length && show(rows[Math.min(rows.length - 1, Math.max(0, rows.indexOf(chosen) + by))]);
  listen(list, move, filters.search, () => RUN.live && hold(held.hidden ? chosen : null));
  list.addEventListener("scroll", paint);
  const key = (name) => el("kbd", {}, name);
  const hint = el(
    "span",
    { class: "soft small hint keys" },
    key("j"),
    " ",
    key("k"),
    " next, previous · ",
    key("/"),
    " search",
    RUN.live ? [" · ", key("h"), " hold beside"] : null,
  );
  $("#browse").append(
    el("p", { class: "soft small", id: "told" }, leftOut()),
    el("div", { class: "filters" }, filters.fields, count, hint),
    el("div", { class: "split" }, list, detail, held),
  );
  new ResizeObserver(paint).observe(list);
  refresh();
}

// j, k, h and / where the episodes are in sight; arrows where the list has the focus.
function listen(list, move, search, hold) {
  document.addEventListener("keydown", (event) => {
    const at = $("#browse").getBoundingClientRect(),
      typing = /INPUT|SELECT|TEXTAREA/.test(event.target.tagName);
    if (typing || event.ctrlKey || event.metaKey || event.altKey || at.top > innerHeight * 0.7 || at.bottom < 0) return;
    const arrows = event.target === list ? { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10, Home: -1e9, End: 1e9 } : {};
    const by = { j: 1, k: -1, ...arrows }[event.key];
    if (event.key === "h") hold();
    if (by || event.key === "/") event.preventDefault();
    if (by) move(by);
    if (event.key === "/") search.focus();
  });
}

function leftOut() {
  const { steps, steps_shown: shownSteps, groups, groups_left_out: dropped } = RUN.training,
    said = [];
  if (groups) {
    const cut = dropped ? `; ${plural(dropped, "group")} of those steps left out, first those with equal rewards` : "";
    said.push(
      `${plural(groups, "training group")} with all siblings, from ${shownSteps} of ${plural(steps, "training step")}${cut}.`,
    );
  } else if (steps) said.push("The training groups are too long for this page.");
  for (const [label, n] of Object.entries(RUN.left_out))
    if (n) said.push(`${plural(n, "episode")} of “${NAMES[label]}” left out for size.`);
  if (RUN.validations) said.push(`Episodes of ${plural(RUN.validations, "validation")} not shown.`);
  if (RUN.tokenizer_fault) said.push(`Tokens are shown as ids: ${visible(RUN.tokenizer_fault)}.`);
  return said.join(" ");
}
