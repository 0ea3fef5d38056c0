// Where the wall seconds went.

const PARTS = ["rollout", "train", "publish", "compile", "sft", "eval", "checkpoint"];

function drawTime() {
  const parts = [...PARTS, ...Object.keys(RUN.seconds).filter((name) => !PARTS.includes(name))].filter(
    (name) => RUN.seconds[name] > 0,
  );
  $("#time").hidden = !parts.length; // of a run that has just begun
  if (!parts.length) return;
  const named = { sft: "warm-up", eval: "evaluation", train: "gradient", publish: "publish weights" },
    cls = (part) => "t" + Math.min(6, PARTS.indexOf(part) < 0 ? 6 : PARTS.indexOf(part));
  const values = parts.map(() => el("strong")),
    total = el("span", { class: "soft small" }),
    whole = Object.values(RUN.seconds).reduce((sum, s) => sum + s, 0),
    box = el("div", { class: "area", tabindex: 0, role: "group", "aria-label": "Seconds per step by part" });
  const bar = el(
    "div",
    { class: "bar", "aria-hidden": "true" },
    parts.map((part) => {
      const i = el("i", { class: cls(part), title: named[part] ?? part });
      i.style.flex = `${RUN.seconds[part]} 0 0`;
      return i;
    }),
  );
  const columns = parts.map((part) => X.map((x, i) => CURVES[`time/${part}_s`]?.[i] ?? 0));
  const sums = X.map((x, i) => columns.reduce((sum, column) => sum + column[i], 0)),
    sorted = [...sums].sort((a, b) => a - b);
  // Without the tallest: the first step compiles, and would flatten the others.
  const high = Math.max(sorted[Math.floor(0.97 * (sorted.length - 1))] * 1.25, 1e-3);
  const paint = (root, toX, toY) => {
    const floor = X.map(() => 0),
      left = (i) => toX(i ? X[i - 1] : X[0] - 1).toFixed(1);
    columns.forEach((column, j) => {
      const up = column.map((v, i) => [toY(floor[i] + v), toY(floor[i])]);
      root.append(
        svg("path", {
          class: "mark " + cls(parts[j]),
          "shape-rendering": "crispEdges",
          d: up
            .map(([a, b], i) => `M${left(i)},${b.toFixed(1)}V${a.toFixed(1)}H${toX(X[i]).toFixed(1)}V${b.toFixed(1)}z`)
            .join(""),
        }),
      );
      column.forEach((v, i) => {
        floor[i] += v;
      });
    });
    if (WARMUP && RUN.steps_done > 0)
      root.append(
        svg("line", { class: "cross", x1: toX(0), x2: toX(0), y1: 0, y2: toY(0) }),
        svg("text", { x: toX(0) + 6, y: 12 }, "training"),
        svg("text", { x: toX(0) - 6, y: 12, "text-anchor": "end" }, "warm-up"),
      );
  };
  const show = (i) => {
    total.textContent =
      i === null ? `${duration(whole)} in steps` : `${X[i] < 1 ? "warm-up " : ""}step ${stepName(X[i])}: ${duration(sums[i])}`;
    values.forEach((value, j) => {
      value.textContent =
        i === null
          ? `${duration(RUN.seconds[parts[j]])} · ${percent(RUN.seconds[parts[j]] / whole, 0)}`
          : duration(columns[j][i]);
    });
  };
  $("#time").append(
    el(
      "figure",
      { class: "card", style: "margin-top: 18px; padding: 18px 20px" },
      el("figcaption", {}, el("span", {}, "Where the seconds went"), total),
      bar,
      el(
        "div",
        { class: "parts" },
        parts.map((part, j) =>
          el("span", { class: cls(part) }, el("i", { class: "key" }), (named[part] ?? visible(part)) + " ", values[j]),
        ),
      ),
      box,
      el(
        "div",
        { class: "soft small" },
        "Seconds per step. Higher steps are cut off at the top; pointing at one tells its seconds.",
      ),
    ),
  );
  frame(box, { axis: "all", xs: X, low: 0, high, format: number, paint, show });
}
