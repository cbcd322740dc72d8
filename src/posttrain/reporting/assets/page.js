// Draws the charts of a page that is one file: each figure holds its chart as JSON, and what it says without a script.
const group = chartGroup({ latest: "latest" });
for (const figure of document.querySelectorAll("figure.chart")) {
  const spec = JSON.parse(figure.querySelector("script").textContent);
  const chart = new Chart(group, spec);
  figure.replaceWith(chart.element);
  chart.update(spec.curves, spec.marks);
}
document.getElementById("smooth")?.addEventListener("change", (event) => { group.smooth = event.target.checked; group.redraw(); });
document.getElementById("not-drawn").remove();
