// What the run was, and what came of it.

const NAMES = { before: "before", after: "after", ablated: "blind" };
const WARMUP = RUN.warmup_steps;

function facts() {
  const c = (path) => at(CONFIG, path),
    total = Object.values(RUN.seconds).reduce((sum, s) => sum + s, 0),
    list = [],
    add = (name, value) => value && list.push([name, value]);
  add("Algorithm", c("algo.name"));
  if (c("feed.prompts")) add("Each step", `${c("feed.prompts")} tasks × ${c("feed.rollouts")} rollouts`);
  const shape = c("model.layers") && `${c("model.layers")} layers of ${c("model.width")}, from scratch`;
  add("Policy", c("init_from") ? visible(String(c("init_from")).replace(/\/+$/, "").split("/").pop()) : shape);
  add("Training steps", `${Math.max(0, RUN.steps_done)}${c("train.steps") ? ` of ${c("train.steps")}` : ""}`);
  add("Warm-up", WARMUP ? `${plural(WARMUP, "step")}, supervised` : "none");
  if (c("agent.max_turns"))
    add("Episode", `up to ${plural(c("agent.max_turns"), "turn")}, ${plural(c("agent.max_tokens") ?? 0, "token")}`);
  add("Seed", known(c("seed")) && String(c("seed")));
  add("Time in steps", total > 0 && duration(total));
  return el(
    "dl",
    { class: "facts" },
    list.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, visible(value)))),
  );
}

function figure(label, result, kind) {
  const tasks = result.n && `${plural(result.n, "task")}${result.k > 1 ? ` × ${result.k}` : ""}`;
  const ci = result.ci95 && known(result.ci95[0]) && `95% CI ${(100 * result.ci95[0]).toFixed(1)} – ${percent(result.ci95[1])}`;
  return el(
    "div",
    { class: kind },
    el("span", { class: "soft small" }, label),
    el("b", {}, percent(result.success)),
    el("div", { class: "soft small" }, ci || ""),
    el("div", { class: "soft small" }, tasks || result.note || ""),
    result.broken ? el("div", { class: "soft small" }, `${result.broken} broken, not counted`) : "",
  );
}

function latest() {
  // what stands for `after` while a run is not finished
  for (const [name, label] of [
    ["eval/success", "validation tasks"],
    ["reward/success", "training tasks"],
  ])
    for (let i = X.length - 1; i >= 0 && CURVES[name]; i--)
      if (known(CURVES[name][i])) return figure(label, { success: CURVES[name][i], note: `at step ${X[i]}` }, "main");
  return null;
}

function difficulties() {
  const maps = Object.keys(NAMES).map((label) => new Map(Object.entries(EVALS[label]?.by_difficulty ?? {})));
  const names = [...new Set(maps.flatMap((map) => [...map.keys()]))].sort(natural);
  const row = (name) => {
    const [before, after, ablated] = maps.map((map) => map.get(name)?.[0]);
    const dot = (value, cls) => {
      const i = el("i", { class: cls });
      i.style.left = 100 * value + "%";
      return known(value) ? i : null;
    };
    const span = el("i", { class: "span" });
    span.style.left = 100 * Math.min(before, after) + "%";
    span.style.width = 100 * Math.abs(after - before) + "%";
    const rail = el(
      "div",
      { class: "rail" },
      known(before) && known(after) ? span : null,
      dot(ablated, "ablated"),
      dot(before, ""),
      dot(after, "after"),
    );
    const n = Math.max(...maps.map((map) => map.get(name)?.[1] ?? 0));
    return el(
      "tr",
      {},
      el("td", {}, visible(name || "all")),
      el("td", { class: "soft" }, n || "—"),
      el("td", { class: "track" }, rail),
      el("td", {}, percent(before, 0)),
      el("td", {}, el("strong", {}, percent(after, 0))),
      EVALS.ablated ? el("td", { class: "soft" }, percent(ablated, 0)) : null,
    );
  };
  const heads = ["Difficulty", "n", "", "before", "after", ...(EVALS.ablated ? ["blind"] : [])];
  return names.length
    ? el(
        "table",
        {},
        el(
          "thead",
          {},
          el(
            "tr",
            {},
            heads.map((h) => el("th", { class: h ? null : "track" }, h)),
          ),
        ),
        el("tbody", {}, names.map(row)),
      )
    : null;
}

function drawHeader() {
  const world = visible(at(CONFIG, "env.name") || "a run"),
    { before, after, ablated } = EVALS,
    table = difficulties();
  document.title = `${world} · ${
    [before, after]
      .filter(Boolean)
      .map((r) => percent(r.success))
      .join(" → ") || "jaxagent run"
  }`;
  const first = before ? figure(after ? "before training" : "held-out, before training", before, "") : null;
  const last = after ? figure("after", after, "main") : latest();
  $("#head").append(
    ...[
      el(
        "div",
        { class: "row spread" },
        el("span", { class: "soft" }, "jaxagent run"),
        RUN.finished ? "" : el("span", { class: "pill" }, "unfinished"),
      ),
      el("h1", {}, world),
      facts(),
      first || last
        ? el(
            "div",
            { class: "score" },
            el(
              "div",
              { class: "panel" },
              el("div", { class: "soft small" }, after ? "Success on held-out tasks" : "Success"),
              el(
                "div",
                { class: "figures" },
                first,
                first && last ? el("span", { class: "arrow", "aria-hidden": "true" }, "→") : null,
                last,
                ablated ? figure(NAMES.ablated, ablated, "minor") : null,
              ),
            ),
            table ? el("div", { class: "panel" }, table) : null,
          )
        : null,
    ].filter(Boolean),
  );
}
