// The list of episodes, its filters and keys, and the episode that is open.

const BROWSER = { open: () => {} };
const ROW = 54; // px, as in the style
const setName = (t) => (t.set === "train" ? `step ${t.step}` : (NAMES[t.set] ?? t.set));
const setKey = (t) => (t.set === "train" ? `train ${t.step}` : t.set);
const family = (t) => JSON.stringify([t.set, t.step, t.group, t.role]);
const sameTask = (t) => t.set !== "train" && JSON.stringify([t.group, t.rollout, t.role]);

function index(list, key) {
  const map = new Map();
  list.forEach((t, i) =>
    map
      .set(key(t), map.get(key(t)) ?? [])
      .get(key(t))
      .push(i),
  );
  return map;
}

function drawDetail(i, families, tasks, surprise) {
  const t = ALL[i];
  const siblings = families.get(family(t)),
    others = sameTask(t) ? tasks.get(sameTask(t)) : [];
  const most = Math.max(0, ...siblings.flatMap((j) => ALL[j].turns.map((turn) => Math.abs(turn.advantage ?? 0))));
  const chips = (name, list, label) => {
    const buttons = list.map((j) => {
      const button = el(
        "button",
        { type: "button", "aria-current": String(i === j) },
        el("span", { class: tone(ALL[j]) }, "● "),
        label(ALL[j]),
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
    plural(t.turns.length, "turn"),
    plural(t.tokens.length, "token"),
    duration(t.seconds),
    t.attempts > 1 ? `attempt ${t.attempts}` : "",
    `seed ${t.seed}`,
    t.role === "agent" ? "" : t.role,
  ]
    .filter(Boolean)
    .map(visible);
  return [
    el("div", { class: "row spread" }, el("h3", {}, visible(t.task)), el("strong", { class: tone(t) }, outcome(t))),
    el("p", { class: "soft small" }, facts.join(" · ")),
    t.error ? el("p", { class: "fault small" }, visible(t.error)) : null,
    chips(`group ${visible(t.group)}`, siblings, (sibling) => number(sibling.reward)),
    chips("same task", others, setName),
    ...drawFlow(t, most, surprise),
  ].filter(Boolean);
}

// The filters: their elements, whether a trajectory passes, and how to let all pass.
function drawFilters(changed) {
  const unique = (key) => [...new Set(ALL.map(key))].filter(Boolean).sort(natural);
  const select = (label, values) =>
    el(
      "select",
      { "aria-label": label },
      el("option", { value: "" }, label),
      values.map(([value, text]) => el("option", { value }, visible(text))),
    );
  const evaluated = Object.keys(NAMES)
    .filter((name) => ALL.some((t) => t.set === name))
    .map((name) => [name, NAMES[name]]);
  const steps = [...new Set(ALL.filter((t) => t.set === "train").map((t) => t.step))].map((step) => [
    `train ${step}`,
    `step ${step}`,
  ]);
  const sets = select("all sets", [...evaluated, ...(steps.length ? [["train", "all training steps"]] : []), ...steps]);
  const results = select("any result", [
    ["solved", "solved"],
    ["failed", "failed"],
    ["broken, not counted", "broken"],
  ]);
  const stops = select(
    "any stop",
    unique((t) => t.stop).map((stop) => [stop, stop.replaceAll("_", " ")]),
  );
  const levels = select(
    "any difficulty",
    unique((t) => t.difficulty).map((name) => [name, name]),
  );
  const search = el("input", { type: "search", placeholder: "search in text, calls, reasons", "aria-label": "search" });
  const fields = [sets, results, stops, levels, search];
  for (const field of fields) field.addEventListener("input", changed);
  const passes = (t) =>
    (!sets.value || sets.value === t.set || sets.value === setKey(t)) &&
    (!results.value || results.value === outcome(t)) &&
    (!stops.value || stops.value === t.stop) &&
    (!levels.value || levels.value === t.difficulty) &&
    (!search.value || plain(t).includes(search.value.toLowerCase()));
  return {
    fields,
    passes,
    search,
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
  if (!ALL.length) return $("#browse").append(el("p", { class: "soft" }, leftOut() || "No episodes stored yet."));
  const families = index(ALL, family),
    tasks = index(ALL, sameTask),
    surprise = { on: false };
  const filters = drawFilters(() => refresh());
  const count = el("span", { class: "soft small", role: "status" }),
    tall = el("div", { style: "position: relative" });
  const list = el("div", { id: "list", class: "panel", role: "listbox", tabindex: 0, "aria-label": "Episodes" }, tall);
  const detail = el("div", { id: "detail", class: "panel" });
  let rows = [],
    chosen = -1;
  const paint = () => {
    // only the rows in sight: there may be thousands
    const from = Math.max(0, Math.floor(list.scrollTop / ROW) - 4),
      to = Math.min(rows.length, from + Math.ceil(list.clientHeight / ROW) + 9);
    tall.style.height = rows.length * ROW + "px";
    tall.replaceChildren(...rows.slice(from, to).map((j, k) => drawRow(j, from + k, rows.length, j === chosen)));
  };
  const refresh = (keep = chosen) => {
    rows = ALL.map((t, j) => j).filter((j) => filters.passes(ALL[j]));
    count.textContent = `${rows.length.toLocaleString("en")} of ${ALL.length.toLocaleString("en")}`;
    list.scrollTop = 0;
    if (rows.length && !rows.includes(keep)) show(rows[0]);
    paint();
  };
  const show = (j) => {
    chosen = j;
    const top = rows.indexOf(j) * ROW;
    if (top < list.scrollTop || top + ROW > list.scrollTop + list.clientHeight)
      list.scrollTop = top - list.clientHeight / 2 + ROW / 2;
    list.setAttribute("aria-activedescendant", "episode" + j);
    paint();
    showTip(null);
    detail.replaceChildren(...drawDetail(j, families, tasks, surprise));
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
  const move = (by) => rows.length && show(rows[Math.min(rows.length - 1, Math.max(0, rows.indexOf(chosen) + by))]);
  listen(list, move, filters.search);
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
  );
  $("#browse").append(
    el("p", { class: "soft small" }, leftOut()),
    el("div", { class: "filters" }, filters.fields, count, hint),
    el("div", { class: "split" }, list, detail),
  );
  new ResizeObserver(paint).observe(list);
  refresh();
}

// j, k and / where the episodes are in sight; arrows where the list has the focus.
function listen(list, move, search) {
  document.addEventListener("keydown", (event) => {
    const at = $("#browse").getBoundingClientRect(),
      typing = /INPUT|SELECT|TEXTAREA/.test(event.target.tagName);
    if (typing || event.ctrlKey || event.metaKey || event.altKey || at.top > innerHeight * 0.7 || at.bottom < 0) return;
    const arrows = event.target === list ? { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10, Home: -1e9, End: 1e9 } : {};
    const by = { j: 1, k: -1, ...arrows }[event.key];
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
