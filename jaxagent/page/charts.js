// Curves over the training step, drawn to true pixels, with one crosshair for all.

function ticks(low, high, count) {
  const step = 10 ** Math.floor(Math.log10((high - low) / count));
  const nice = [1, 2, 2.5, 5, 10].map((m) => m * step).find((s) => (high - low) / s <= count) ?? step * 10;
  const list = [];
  for (let i = Math.ceil(low / nice - 1e-9); i * nice <= high + nice * 1e-9; i++) list.push(+(i * nice).toPrecision(12));
  return list;
}

// Round step numbers from x0 to x1: of the warm-up, which ends at 0, and of training.
function places(x0, x1, count) {
  const whole = (low, high) => (high > low ? ticks(low, high, Math.max(1, (count * (high - low)) / (x1 - x0))) : []);
  const warm = x0 < 0 ? whole(0, WARMUP).map((v) => v - WARMUP) : [];
  const apart = (v) => v >= x0 && -v > (x1 - x0) / (1.5 * count);
  return [...warm.filter(apart), ...whole(0, x1)].filter(Number.isInteger);
}

function smooth(values) {
  const half = values.length < 12 ? 0 : Math.max(1, Math.round(values.length / 45));
  return values.map((value, i) => {
    const near = values.slice(Math.max(0, i - half), i + half + 1).filter(known);
    return known(value) && near.length ? near.reduce((a, b) => a + b) / near.length : null;
  });
}

const FRAMES = { train: [], warm: [], all: [] }; // charts of one axis share their crosshair

// An svg that fills `box`, redrawn to true pixels at every size, with axes, a crosshair, and arrow keys.
function frame(box, { axis, xs, low, high, format, paint, show }) {
  let cross,
    toX,
    i = null;
  const [x0, x1] = [axis === "all" ? xs[0] - 1 : 0, Math.max(1, xs[0], xs.at(-1))];
  const draw = () => {
    const width = box.clientWidth,
      height = box.clientHeight,
      top = 8,
      bottom = height - 18;
    if (!width || !height) return;
    const labels = ticks(low, high, height > 200 ? 5 : 4),
      left = 8 + 6.2 * Math.max(...labels.map((v) => format(v).length));
    toX = (x) => left + ((x - x0) / (x1 - x0)) * (width - left - 8);
    const toY = (y) => bottom - ((Math.min(high, Math.max(low, y)) - low) / (high - low)) * (bottom - top);
    const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
    for (const v of labels)
      root.append(
        svg("line", { class: "grid-line", x1: left, x2: width, y1: Math.round(toY(v)) + 0.5, y2: Math.round(toY(v)) + 0.5 }),
        svg("text", { x: left - 6, y: toY(v) + 3.5, "text-anchor": "end" }, format(v)),
      );
    for (const v of places(x0, x1, width / (width > 400 ? 80 : 60)))
      root.append(
        svg(
          "text",
          { x: toX(v), y: height - 3, "text-anchor": toX(v) > width - 24 ? "end" : "middle" },
          v < 0 ? v + WARMUP : v,
        ),
      );
    paint(root, toX, toY);
    cross = root.appendChild(svg("line", { class: "cross", y1: top, y2: bottom, visibility: "hidden" }));
    box.replaceChildren(root);
    self.move(i);
  };
  const self = {
    move(index) {
      i = index;
      if (cross) cross.setAttribute("visibility", index === null ? "hidden" : "visible");
      if (cross && index !== null) for (const end of ["x1", "x2"]) cross.setAttribute(end, toX(xs[index]));
      show(index);
    },
  };
  const all = (index) => {
    FRAMES[axis].forEach((other) => other.move(index));
    const span = RUN.steps_per_point > 1 ? ` (mean of the ${RUN.steps_per_point} steps up to it)` : "";
    const step = index !== null && (axis === "warm" ? xs[index] : stepName(xs[index]));
    const phase = axis === "warm" || xs[index] < 1 ? "warm-up " : "";
    $("#at").textContent = index === null ? HINT : `${phase}step ${step}${span}`;
  };
  const nearest = (event) => {
    const px = event.clientX - box.getBoundingClientRect().left;
    return xs.reduce((best, x, j) => (Math.abs(toX(x) - px) < Math.abs(toX(xs[best]) - px) ? j : best), 0);
  };
  box.addEventListener("pointermove", (event) => toX && all(nearest(event)));
  box.addEventListener("pointerleave", () => all(null));
  box.addEventListener("blur", () => all(null));
  box.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 }[event.key];
    if (!by) return;
    event.preventDefault();
    all(Math.min(xs.length - 1, Math.max(0, (i ?? (by > 0 ? -1 : xs.length)) + by)));
  });
  FRAMES[axis].push(self);
  self.move(null);
  new ResizeObserver(draw).observe(box);
}
const HINT = RUN.x.length ? "point at a chart, or focus one and press ← →, to read a step" : "";
const stepName = (x) => (x > 0 ? x : x + WARMUP); // the warm-up counts up to 0

function chart({ name, series, share, axis = "train", marks = [], wide, format = number }) {
  const rows = X.map((x, i) => i).filter((i) => (axis === "warm" ? X[i] <= 0 : X[i] > 0));
  const lines = series.map((s) => ({ ...s, y: rows.map((i) => CURVES[s.key]?.[i] ?? null) })).filter((s) => s.y.some(known));
  const xs = rows.map((i) => (axis === "warm" ? stepName(X[i]) : X[i]));
  if (!lines.length || !xs.length) return null;
  const values = lines.flatMap((s) => s.y.filter(known));
  const low = share ? 0 : Math.min(0, ...values),
    most = Math.max(0, ...values),
    high = share ? 1 : most + (0.02 * (most - low) || 1);
  const value = el("span", { class: "value" }),
    box = el("div", { class: "plot", tabindex: 0, role: "group" });
  const last = (y) => y.findLast(known);
  box.setAttribute(
    "aria-label",
    `${name}: ${lines.map((s) => `${s.label ?? ""} from ${format(s.y.find(known))} to ${format(last(s.y))}`).join("; ")}`,
  );
  const paint = (root, toX, toY) => {
    for (const s of lines) {
      const points = s.y.map((y, i) => [xs[i], y]).filter(([, y]) => known(y)),
        group = svg("g", { class: s.cls });
      const path = (list) => "M" + list.map(([x, y]) => `${toX(x).toFixed(1)},${toY(y).toFixed(1)}`).join("L");
      if (!s.points) for (const [x, y] of points) group.append(svg("circle", { class: "raw", cx: toX(x), cy: toY(y), r: 1.5 }));
      const calm = s.points
        ? points
        : smooth(s.y)
            .map((y, i) => [xs[i], y])
            .filter(([, y]) => known(y));
      group.append(svg("path", { class: "line", d: path(calm) }));
      if (s.points) for (const [x, y] of points) group.append(svg("circle", { class: "dot", cx: toX(x), cy: toY(y), r: 3.5 }));
      root.append(group);
    }
    for (const { x, result, cls } of marks) {
      const cx = toX(x),
        cy = toY(result.success),
        group = svg("g", { class: cls });
      if (known(result.ci95?.[0]))
        group.append(svg("line", { class: "whisker", x1: cx, x2: cx, y1: toY(result.ci95[0]), y2: toY(result.ci95[1]) }));
      group.append(svg("path", { class: "mark", d: `M${cx},${cy - 6}l6,6l-6,6l-6,-6z` }));
      root.append(group);
    }
  };
  const at = lines.map((s) => el("span", lines.length > 1 ? { class: s.cls, style: "color: var(--c)" } : {}));
  const many = lines.length > 2; // then each figure stands by its key: a caption has no room for them
  if (!many) value.append(...at.flatMap((span, j) => (j ? [el("span", { class: "soft" }, " · "), span] : [span])));
  const show = (i) =>
    lines.forEach((s, j) => {
      at[j].textContent = format(i === null || s.points ? last(s.y.slice(0, (i ?? xs.length) + 1)) : s.y[i]);
    });
  const keys = [...lines, ...marks].filter((s) => s.label);
  const legend =
    keys.length > 1 || wide
      ? el(
          "div",
          { class: "legend" },
          keys.map((s, j) =>
            el("span", { class: s.cls }, el("i", { class: "key" }), s.label, many && lines[j] === s ? [" ", at[j]] : null),
          ),
        )
      : null;
  frame(box, { axis, xs, low, high, format: share ? (v) => percent(v, 0) : format, paint, show });
  return el("figure", { class: wide ? "card wide" : "card" }, el("figcaption", {}, el("span", {}, name), value), legend, box);
}

const GAP_BY_TURN = "policy/sampler_logprob_gap_turn_";

function drawCurves() {
  const one = (name, key, more = {}) => ({ name, series: [{ key, cls: "s0" }], ...more }),
    p = (v) => percent(v, 1);
  const marks = [
    ["before", 0, "s2"],
    ["after", Math.max(1, RUN.steps_done), "s2"],
    ["ablated", Math.max(1, RUN.steps_done), "s1"],
  ]
    .filter(([label]) => known(EVALS[label]?.success))
    .map(([label, x, cls]) => ({
      x,
      cls,
      result: EVALS[label],
      label: label === "after" ? "" : label === "before" ? "held-out, before and after" : NAMES[label],
    }));
  const levels = Object.keys(CURVES)
    .filter((key) => key.startsWith("eval/success_"))
    .sort(natural);
  const held = [...new Set([0, 1 / 3, 2 / 3, 1].map((share) => levels[Math.round(share * (levels.length - 1))]))].filter(
    Boolean,
  );
  const specs = [
    {
      name: "Success",
      share: true,
      wide: true,
      marks,
      format: p,
      series: [
        { key: "reward/success", cls: "s0", label: "training tasks" },
        { key: "eval/success", cls: "s3", label: "validation tasks", points: true },
      ],
    },
    one("Reward, mean", "reward/mean"),
    one("Turns per episode", "rollout/turns"),
    one("Entropy of sampled tokens, nats", "rollout/entropy"),
    one("Groups with differing rewards", "reward/informative_groups", { share: true, format: p }),
    one("Log-prob gap, sampler to trainer", "policy/sampler_logprob_gap"),
    {
      name: "Log-prob gap by turn position",
      series: Object.keys(CURVES)
        .filter((key) => key.startsWith(GAP_BY_TURN))
        .sort(natural)
        .map((key, i) => {
          const [first, on] = key.slice(GAP_BY_TURN.length).split("_");
          return { key, cls: "s" + (i % 4), label: `turn ${+first + 1}${on ? " on" : ""}` };
        }),
    },
    {
      name: "Staleness of tokens, versions",
      series: [
        { key: "feed/staleness_mean", cls: "s0", label: "mean" },
        { key: "feed/staleness_max", cls: "s1", label: "oldest" },
      ],
    },
    one("Clipped tokens", "policy/clip_frac", { format: (v) => percent(v, 2) }),
    one("KL to the sampling policy", "policy/kl"),
    one("Gradient norm", "policy/grad_norm"),
    one("Sampled tokens per second", "engine/tokens_per_s"),
    {
      name: "Faulty turns and calls",
      format: p,
      series: [
        { key: "rollout/parse_errors", cls: "s0", label: "unreadable turns" },
        { key: "rollout/tool_errors", cls: "s1", label: "failed calls" },
      ],
    },
    {
      name: "Validation by level",
      share: true,
      format: (v) => percent(v, 0),
      series: held.map((key, i) => ({
        key,
        cls: "s" + [3, 0, 2, 1][i],
        points: true,
        label: visible(key.slice(13).replaceAll("_", " ")),
      })),
    },
    one("Imitation loss, nats per token", "sft/nll"),
    one("Preference loss, nats per pair", "dpo/loss"),
    one("Preference margin", "dpo/margin"),
    one("Warm-up loss, nats per token", "sft/nll", { axis: "warm" }),
  ];
  const cards = specs.map(chart).filter(Boolean);
  $("#curves .grid").append(...(cards.length ? cards : [el("p", { class: "soft" }, "No steps yet.")]));
  $("#at").textContent = cards.length ? HINT : "";
}
