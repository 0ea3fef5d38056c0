// A page that follows its run: episodes are asked for as they appear, and one with its tokens when it is opened.

async function ask(what) {
  const answer = await fetch(what, { cache: "no-store" });
  if (!answer.ok) throw new Error(`${what}: ${await answer.text()}`);
  return answer.json();
}

async function fetchEpisode(j) {
  const { item, vocab } = await ask(`episode?at=${j}`);
  Object.assign(RUN.vocab, vocab);
  Object.assign(ALL[j], item);
}

// Everything above the episodes again, in place.
function redraw(run) {
  for (const key of Object.keys(CURVES)) delete CURVES[key];
  for (const key of Object.keys(EVALS)) delete EVALS[key];
  Object.assign(CURVES, run.curves);
  Object.assign(EVALS, run.evaluations);
  X.splice(0, X.length, ...run.x);
  for (const name of ["seconds", "steps_done", "steps_per_point", "finished", "beside"]) RUN[name] = run[name];
  for (const list of Object.values(FRAMES)) list.length = 0;
  $("#head").replaceChildren();
  $("#curves .grid").replaceChildren();
  drawHeader();
  drawCurves();
  $("#time").replaceChildren(el("h2", {}, "Time"));
  drawTime();
  drawRuns();
}

// Bad cases by step: how many, and how many of all; a number leads to its episodes.
function drawCases() {
  const kinds = Object.keys(RUN.kinds),
    columns = new Map();
  for (const t of ALL) {
    const key = JSON.stringify([t.run, setKey(t)]);
    const column = columns.get(key) ?? columns.set(key, { t, n: 0, counts: {} }).get(key);
    column.n++;
    for (const kind of t.bad) column.counts[kind] = (column.counts[kind] ?? 0) + 1;
  }
  const sets = [...columns.values()].sort((a, b) => a.t.run - b.t.run || natural(setKey(a.t), setKey(b.t)));
  const cell = (kind, { t, n, counts }) => {
    const count = counts[kind] ?? 0;
    if (!count) return el("td", { class: "soft" }, "0");
    const button = el("button", { type: "button", title: `${percent(count / n)} of ${n}` }, count.toLocaleString("en"));
    button.style.background = `color-mix(in srgb, var(--bad) ${Math.round((45 * count) / n)}%, var(--panel))`;
    button.addEventListener("click", () => BROWSER.filter(kind, t));
    return el("td", {}, button);
  };
  const heads = kinds.map((kind) => el("th", { title: RUN.kinds[kind] }, kind));
  const head = el("tr", {}, el("th", {}, "set"), heads, el("th", {}, "episodes"));
  const body = sets.map((set) =>
    el(
      "tr",
      {},
      el("td", {}, visible(setName(set.t))),
      kinds.map((kind) => cell(kind, set)),
      el("td", {}, set.n.toLocaleString("en")),
    ),
  );
  $("#cases").hidden = !ALL.length;
  $("#cases").replaceChildren(
    el("h2", {}, "Bad cases"),
    el(
      "div",
      { class: "panel scroll", tabindex: 0, role: "group", "aria-label": "Bad cases by step" },
      el("table", { class: "cases" }, el("thead", {}, head), el("tbody", {}, body)),
    ),
  );
}

function leaves(value, path = "") {
  if (value === null || typeof value !== "object" || Array.isArray(value)) return [[path, JSON.stringify(value)]];
  return Object.entries(value).flatMap(([key, inner]) => leaves(inner, path ? `${path}.${key}` : key));
}

// The run and the one beside it: what their configs say differently, and where their figures stand.
function drawRuns() {
  if (!BESIDE) return;
  const both = [RUN, RUN.beside[0]];
  const configs = both.map((run) => new Map(leaves(run.config)));
  const every = [...new Set(configs.flatMap((config) => [...config.keys()]))],
    keys = every.filter((key) => configs[0].get(key) !== configs[1].get(key));
  const last = (run, name) => run.curves[name]?.findLast(known);
  const names = [...new Set(both.flatMap((run) => Object.keys(run.curves)))];
  const comparable = ["before", "after"].filter((label) => !RUN.apart[label]);
  const figures = comparable.map((label) => [label, ...both.map((run) => percent(run.evaluations[label]?.success))]);
  const rows = [
    ...figures.map(([label, ...values]) => [`success, ${label}`, ...values]),
    ...Object.entries(RUN.apart).map(([label, why]) => [`success, ${label}: ${why}`, "not compared", "not compared"]),
    ["training steps", ...both.map((run) => String(Math.max(0, run.steps_done)))],
    ...names.map((name) => [`${name}, last`, ...both.map((run) => number(last(run, name)))]),
    ...keys.map((key) => [key, ...configs.map((config) => config.get(key) ?? "—")]),
  ];
  const folders = RUN.names.map((name) => name.split("/").filter(Boolean).pop());
  const short = folders[0] === folders[1] ? RUN.names : folders;
  const head = (name, i) => el("th", { title: visible(RUN.names[i]) }, visible(`${"AB"[i]} · ${name}`));
  const heads = [el("th"), ...short.map(head)];
  const line = (row) =>
    el(
      "tr",
      {},
      row.map((text, i) => el("td", { class: i && row[1] !== row[2] ? "" : "soft" }, visible(text))),
    );
  $("#runs").hidden = false;
  $("#runs").replaceChildren(
    el("h2", {}, "Two runs"),
    el(
      "div",
      { class: "panel scroll", tabindex: 0, role: "group", "aria-label": "Two runs" },
      el(
        "table",
        {},
        el("thead", {}, el("tr", {}, heads)),
        el("tbody", {}, rows.filter(([, ...values]) => values.some((value) => value !== "—")).map(line)),
      ),
    ),
  );
}

// Asks every second for what is new; what is open stays as it is.
async function follow() {
  RUN.groups = {};
  drawRuns();
  let seen = "";
  for (;;) {
    try {
      const { rows, total, reading, epoch, written, faults, groups } = await ask(`rows?from=${ALL.length}`);
      if (epoch !== RUN.epoch) return location.reload();
      Object.assign(RUN.groups, groups);
      for (const row of rows) ALL.push(row);
      if (rows.length) {
        BROWSER.grow();
        drawCases();
      }
      if (ALL.length === total && written !== seen) {
        redraw(await ask("run"));
        seen = written;
      }
      const state = reading ? "reading …" : RUN.finished ? "" : "following the run";
      $("#told").textContent = [state, ...faults.map(visible)].filter(Boolean).join(" · ");
      document.body.dataset.episodes = ALL.length;
      if (ALL.length < total) continue;
    } catch (error) {
      $("#told").textContent = `not followed any more: ${visible(error.message)}`;
    }
    await new Promise((done) => setTimeout(done, 1000));
  }
}
