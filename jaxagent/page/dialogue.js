// An episode as segments of tokens with an author each, and one task side by side before and after training.

const WHO = { prompt: "prompt", policy: "policy", tool: "tool", environment: "world" };

function segments(t) {
  const parts = [],
    turns = t.turns;
  const outer = (i) => (i < 0 ? "prompt" : turns[i].tools ? "tool" : "environment");
  let done = 0;
  turns.forEach((turn, i) => {
    if (turn.start > done) parts.push({ who: outer(i - 1), start: done, end: turn.start });
    parts.push({ who: "policy", start: turn.start, end: turn.end, turn, number: i });
    done = turn.end;
  });
  if (t.tokens.length > done) parts.push({ who: outer(turns.length - 1), start: done, end: t.tokens.length });
  return parts;
}

// Every token's text; of tokens that are text only together the first has it, and `share` says so of all.
function texts(t) {
  const list = t.tokens.map((id) => ({ text: RUN.vocab[id] ?? `⟨${id}⟩` }));
  for (const [start, end, text] of t.joined)
    for (let i = start; i < end; i++)
      list[i] = { text: i === start ? text : "", share: `token ${i - start + 1} of ${end - start} that make ${text}` };
  return list;
}

const isControl = (text) => /^<[^<>\s]{1,30}>$/.test(text);
const shown = (text) => visible(text).replaceAll("\n", "⏎\n").replaceAll("\t", "⇥\t");
const plain = (t) =>
  t.plain ??
  (t.plain =
    `${t.task}\n${t.error}\n${texts(t)
      .map((piece) => piece.text)
      .join("")}\n` +
    t.turns
      .map(
        (turn) =>
          `${turn.text ?? ""}\n${turn.reason ?? ""}\n${turn.error ?? ""}\n${(turn.tools ?? [])
            .map((tool) => `${tool.name} ${tool.arguments} ${tool.outcome} ${tool.result}`)
            .join("\n")}`,
      )
      .join("\n")).toLowerCase();

// A stretch of tokens as words, control tokens faint.
function words(t, pieces, { start, end, turn }) {
  if (turn?.text !== undefined) return [visible(turn.text)];
  const kids = [];
  let run = "";
  for (const { text } of pieces.slice(start, end)) {
    if (!isControl(text)) {
      run += text;
      continue;
    }
    kids.push(visible(run), el("span", { class: "ctl" }, visible(text)));
    run = "";
  }
  return [...kids, visible(run)];
}

const tone = (t) => (!t.counts ? "soft" : t.solved ? "good" : "bad");
const outcome = (t) => (!t.counts ? "broken, not counted" : t.solved ? "solved" : "failed");
const stopName = (stop) => visible(stop.replaceAll("_", " "));

function drawPairs() {
  if (!RUN.pairs.length) return $("#pairs").remove();
  const kinds = { gained: "failed, then solved", lost: "solved, then failed", failed: "failed twice" };
  const tabs = el("div", { class: "chips", id: "kinds" }),
    stage = el("div", { class: "versus" });
  const side = (label, t) => {
    const pieces = texts(t),
      reasons = t.turns.map((turn) => turn.reason).filter(Boolean);
    return el(
      "article",
      { class: "panel" },
      el("div", { class: "row spread" }, el("strong", {}, label), el("span", { class: "small " + tone(t) }, outcome(t))),
      segments(t).map((part) =>
        el(
          "div",
          { class: `say ${part.who}` },
          el("span", { class: "who" }, WHO[part.who]),
          el("div", { class: "text" }, words(t, pieces, part)),
        ),
      ),
      el(
        "div",
        { class: "verdict small row spread" },
        el("span", { class: tone(t) }, visible(reasons.at(-1) ?? stopName(t.stop))),
        el("button", { type: "button", class: "hint" }, "tokens"),
      ),
    );
  };
  const pick = (pair, chosen) => {
    const [before, after] = [ALL[pair.before], ALL[pair.after]];
    [...tabs.children].forEach((tab) => tab.setAttribute("aria-pressed", tab === chosen));
    stage.replaceChildren(side("Before training", before), side("After", after));
    stage
      .querySelectorAll("button")
      .forEach((button, i) => button.addEventListener("click", () => BROWSER.open([pair.before, pair.after][i])));
  };
  RUN.pairs.forEach((pair) => {
    const t = ALL[pair.after];
    const tab = el("button", { type: "button" }, `${kinds[pair.kind]}${t.difficulty ? ` · ${visible(t.difficulty)}` : ""}`);
    tab.addEventListener("click", () => pick(pair, tab));
    tabs.append(tab);
  });
  $("#pairs").append(
    el("p", { class: "soft small" }, "The same held-out task with the same random draws; the first of each kind."),
    tabs,
    stage,
  );
  pick(RUN.pairs[0], tabs.firstChild);
}
