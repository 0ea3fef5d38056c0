// One episode token by token: who wrote each, how likely it was, and what every turn came to.

const tip = $("#tip");

const fixed = (value) => (known(value) ? value.toFixed(4).replace("-", "−") : "unknown");
const chance = (logprob) => (known(logprob) ? Math.exp(logprob) : null);

function drawTokens(t) {
  const pieces = texts(t),
    versions = t.version.flatMap(([version, n]) => Array(n).fill(version)),
    spans = [];
  let sampled = 0;
  const bodies = segments(t).map((part) => {
    const body = el("div", { class: "text tokens", dir: "ltr" });
    for (let i = part.start; i < part.end; i++) {
      const own = part.who === "policy",
        k = own ? sampled++ : -1,
        { text, share } = pieces[i];
      const stop = own && i === part.end - 1 && RUN.stop.includes(t.tokens[i]);
      const span = el(
        "span",
        { class: `${stop ? "stop" : part.who}${isControl(text) || !text ? " ctl" : ""}` },
        shown(text) || "·",
      );
      if (own) span.style.setProperty("--s", Math.min(85, Math.round(-22 * (t.logprob[k] ?? 0))));
      span.about = () =>
        [
          `${part.who === "policy" ? `policy, turn ${part.number + 1}${stop ? ", stop token" : ""}` : WHO[part.who]}`,
          `token ${i} · id ${t.tokens[i]} · ${JSON.stringify(visible(text))}`,
          share ? visible(share) : "",
          text.includes("\ufffd") && !share ? "bytes that are no text alone" : "",
          own ? `log-prob ${fixed(t.logprob[k])} · probability ${percent(chance(t.logprob[k]), 2)}` : "given, not sampled",
          own ? `policy version ${versions[k]}` : "",
        ]
          .filter(Boolean)
          .join("\n");
      spans.push(span);
      body.append(span);
    }
    return { part, body };
  });
  return { bodies, spans };
}

function showTip(span) {
  document.querySelectorAll(".tokens .on").forEach((old) => old.classList.remove("on"));
  tip.hidden = !span;
  if (!span) return;
  span.classList.add("on");
  tip.textContent = span.about();
  const at = span.getBoundingClientRect(),
    width = tip.offsetWidth,
    height = tip.offsetHeight;
  tip.style.left = Math.max(8, Math.min(at.left, innerWidth - width - 8)) + "px";
  tip.style.top = (at.bottom + height + 8 < innerHeight ? at.bottom + 6 : at.top - height - 6) + "px";
}

function advantage(value, most) {
  if (!known(value)) return null;
  const bar = el("i"),
    share = most > 0 ? (50 * Math.abs(value)) / most : 0;
  const [side, tint] = value < 0 ? ["right", "bad"] : ["left", "good"];
  bar.style.cssText = `width: ${share}%; ${side}: 50%; background: var(--${tint})`;
  return el(
    "span",
    {},
    "advantage",
    el("span", { class: "adv", "aria-hidden": "true" }, bar),
    el(
      "span",
      { class: value > 0 ? "good" : value < 0 ? "bad" : "" },
      signed(value, (v) => v.toFixed(2)),
    ),
  );
}

function aboutTurn(turn, most) {
  const call = (tool) =>
    el(
      "span",
      { class: "call" },
      el("span", { class: "mono" }, visible(`${tool.name || "?"}(${tool.arguments})`)),
      " → ",
      el("span", { class: "mono " + (tool.outcome === "ok" ? "" : "bad") }, visible(tool.result) || "nothing"),
      tool.cut ? ` … ${plural(tool.cut, "more character")}` : "",
      ` · ${visible(tool.outcome.replaceAll("_", " "))} · ${duration(tool.latency_s)}`,
    );
  const named = (scores) =>
    Object.entries(scores).map(([name, score]) => `${visible(name.replaceAll("_", " "))} ${number(score)}`);
  const reward =
    turn.reward || turn.reason || turn.parts
      ? el(
          "span",
          {},
          "reward ",
          el("span", { class: turn.reward > 0 ? "good" : turn.reward < 0 ? "bad" : "" }, number(turn.reward ?? 0)),
          turn.parts ? el("span", { class: "credit" }, ` = ${named(turn.parts).join(" + ")}`) : "",
          turn.reason ? `, ${visible(turn.reason)}` : "",
        )
      : null;
  const checks = turn.checks
    ? el("span", { class: "credit" }, `checked, not trained on: ${named(turn.checks).join(", ")}`)
    : null;
  const kids = [
    ...(turn.tools ?? []).map(call),
    reward,
    checks,
    advantage(turn.advantage, most),
    turn.error ? el("span", { class: "fault call" }, visible(turn.error)) : null,
  ];
  return kids.some(Boolean) ? el("div", { class: "about" }, kids) : null;
}

// The whole episode; `surprise.on` outlives it, so that the next one is shown the same way.
function drawFlow(t, most, surprise) {
  const { bodies, spans } = drawTokens(t);
  const toggle = el("button", { type: "button", "aria-pressed": String(surprise.on), class: "hint" }, "colour by surprise");
  const color = () => bodies.forEach(({ body }) => body.classList.toggle("surprise", surprise.on));
  toggle.addEventListener("click", () => {
    surprise.on = !surprise.on;
    toggle.setAttribute("aria-pressed", surprise.on);
    color();
  });
  const turns = bodies.map(({ part, body }) => {
    const who = el("span", { class: "who" }, part.turn ? `turn ${part.number + 1}` : WHO[part.who]);
    const unread = part.turn?.text === undefined ? null : el("div", { class: "about mono" }, visible(part.turn.text));
    return el(
      "div",
      { class: "turn" },
      el("div", { class: "say" }, who, body),
      unread,
      part.turn ? aboutTurn(part.turn, most) : null,
    );
  });
  const flow = el("div", { tabindex: 0, role: "group", "aria-label": "Tokens: left and right arrows read one by one" }, turns);
  let focus = -1;
  flow.addEventListener("pointerover", (event) => showTip(event.target.about ? event.target : null));
  flow.addEventListener("pointerleave", () => showTip(null));
  flow.addEventListener("blur", () => showTip(null));
  flow.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by || !spans.length) return;
    event.preventDefault();
    focus = Math.min(spans.length - 1, Math.max(0, focus + by));
    spans[focus].scrollIntoView({ block: "nearest" });
    showTip(spans[focus]);
  });
  color();
  const legend = [
    ["prompt", "prompt, world"],
    ["policy", "policy"],
    ["stop", "its stop token"],
    ["tool", "tool result"],
  ];
  const authors = el(
    "div",
    { class: "legend tokens" },
    legend.map(([author, text]) => el("span", { class: author }, text)),
  );
  return [el("div", { class: "row spread", style: "margin: 16px 0 8px" }, authors, toggle), flow];
}
