// Reads values out under the pointer: the same step in every chart. Arrow keys move it when a chart has the focus.
(() => {
  "use strict";
  const SVG = "http://www.w3.org/2000/svg";

  const short = (value) => {
    const size = Math.abs(value);
    if (size < 1e-12) return "0";
    if (size >= 1e6 || size < 1e-4) return value.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e");
    if (size >= 1e4) return String(Number((value / 1000).toPrecision(4))) + "k";
    return String(Number(value.toPrecision(4)));
  };

  // Index of the last step at or before `step`, -1 if there is none.
  const before = (steps, step) => {
    let low = 0, high = steps.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (steps[middle] <= step) low = middle + 1; else high = middle;
    }
    return low - 1;
  };

  const pixel = ([low, high, from, to], value) => from + ((value - low) / (high - low)) * (to - from);

  const charts = [...document.querySelectorAll("figure.chart")].map((figure) => {
    const data = JSON.parse(figure.querySelector("script").textContent);
    const values = [...figure.querySelectorAll(".legend b")];
    return {
      figure, data, values, svg: figure.querySelector("svg"), at: figure.querySelector(".at"),
      cursor: figure.querySelector(".cursor"), dots: figure.querySelector(".cursor-dots"),
      latest: values.map((value) => value.textContent),
    };
  });

  const read = (chart, step) => {
    const { data } = chart;
    const x = pixel(data.x, step);
    const inside = x >= data.x[2] - 1 && x <= data.x[3] + 1;
    chart.figure.classList.toggle("reading", inside);
    chart.dots.replaceChildren();
    if (!inside) return;
    chart.at.textContent = "step " + step;
    chart.cursor.setAttribute("x1", x);
    chart.cursor.setAttribute("x2", x);
    data.series.forEach((series, index) => {
      const place = before(series.steps, step);
      const value = place < 0 ? null : series.values[place];
      const old = place >= 0 && !data.stacked && series.steps[place] < step ? " @" + series.steps[place] : "";
      chart.values[index].textContent = value === null ? "–" : short(value) + (data.unit || "") + old;
      if (value === null || data.stacked || value < data.y[0] || value > data.y[1]) return;
      const dot = document.createElementNS(SVG, "circle");
      dot.setAttribute("class", "s" + index);
      dot.setAttribute("cx", pixel(data.x, series.steps[place]));
      dot.setAttribute("cy", pixel(data.y, value));
      dot.setAttribute("r", 4);
      chart.dots.append(dot);
    });
  };

  const release = () => charts.forEach((chart) => {
    chart.figure.classList.remove("reading");
    chart.dots.replaceChildren();
    chart.at.textContent = "latest";
    chart.values.forEach((value, index) => { value.textContent = chart.latest[index]; });
  });

  // The steps of the chart that is closest to `wanted`, so that the pointer snaps to what was measured.
  const snap = (chart, wanted) => {
    const candidates = chart.data.series.flatMap((series) => {
      const place = before(series.steps, wanted);
      return [series.steps[place], series.steps[place + 1]].filter((step) => step !== undefined);
    });
    return candidates.reduce((best, step) => (Math.abs(step - wanted) < Math.abs(best - wanted) ? step : best));
  };

  let current = null;
  const show = (step) => { current = step; charts.forEach((chart) => read(chart, step)); };

  charts.forEach((chart) => {
    const [low, high, from, to] = chart.data.x;
    chart.svg.addEventListener("pointermove", (event) => {
      const box = chart.svg.getBoundingClientRect();
      const x = ((event.clientX - box.left) / box.width) * chart.svg.viewBox.baseVal.width;
      show(snap(chart, low + ((x - from) / (to - from)) * (high - low)));
    });
    chart.svg.addEventListener("pointerleave", release);
    chart.svg.addEventListener("blur", release);
    chart.svg.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!move) return;
      event.preventDefault();
      const steps = [...new Set(chart.data.series.flatMap((series) => series.steps))].sort((a, b) => a - b);
      const place = current === null ? steps.length - 1 : before(steps, current) + move;
      show(steps[Math.max(0, Math.min(steps.length - 1, place))]);
    });
  });

  const smooth = document.getElementById("smooth");
  if (smooth) smooth.addEventListener("change", () => document.body.classList.toggle("rough", !smooth.checked));
})();
