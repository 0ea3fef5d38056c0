// The page, from top to bottom.

drawHeader();
drawCurves();
drawTime();
drawPairs();
drawBrowser();
if (RUN.live) follow();
$("footer").append(
  el(
    "details",
    {},
    el("summary", {}, "The run's config"),
    el("pre", { class: "panel mono" }, visible(JSON.stringify(CONFIG, null, 2))),
  ),
);
