// Curves over steps, drawn as SVG at the size that there is. The pointer reads the same step in every chart of a page;
// arrow keys move it, Enter opens the step, dragging chooses a range.
import { h, s } from "./dom.js";
import { short } from "./format.js";
import { before, smoothed, tickLabels, ticks, usualValues, valueRange } from "./scales.js";

const LEFT = 46, RIGHT = 12, TOP = 14, BOTTOM = 24;
const MIN_SMOOTH = 20, MAX_DOTS = 50;

// What the charts of a page share: the step under the pointer, and what to do with a chosen step or range.
export const chartGroup = ({ onstep = null, onrange = null } = {}) => {
  const charts = new Set();
  return {
    charts, onstep, onrange, smooth: true,
    read: (step) => charts.forEach((chart) => chart.read(step)),
    redraw: () => charts.forEach((chart) => chart.draw()),
  };
};

// `curves`: [{ name, colour, data: { steps, mean, low, high } }]. `marks`: [{ step, kind, text }]
export class Chart {
  constructor(group, { title, note = "", wide = false, bands = [], id = "" }) {
    Object.assign(this, { group, title, bands, curves: [], marks: [], at: null });
    this.legend = h("div", { class: "legend" });
    this.place = h("span", { class: "at" }, "");
    this.box = h("div", { class: "plot" });
    this.element = h("figure", { class: `card chart${wide ? " wide" : ""}`, id: id || null },
      h("figcaption", null, h("h3", null, title), this.place), this.legend, this.box, note ? h("p", { class: "note" }, note) : null);
    this.height = wide ? 250 : 190;
    new ResizeObserver(() => this.draw()).observe(this.box);
    group.charts.add(this);
  }

  update(curves, marks, bands = this.bands) {
    const shown = curves.filter((curve) => curve.data.mean.some((value) => value !== null));
    Object.assign(this, { curves: shown, marks, bands, changed: true });
    this.legend.replaceChildren(...shown.map((curve) => h("span", { class: `key s${curve.colour}` }, h("i"), curve.name, " ", h("b"))));
    this.values = [...this.legend.querySelectorAll("b")];
    this.draw();
  }

  x(step) { return LEFT + ((step - this.first) / (this.last - this.first)) * (this.width - LEFT - RIGHT); }
  y(value) { return this.height - BOTTOM - ((value - this.low) / (this.high - this.low)) * (this.height - TOP - BOTTOM); }

  draw() {
    this.width = Math.round(this.box.clientWidth);
    if (!this.width) return;
    if (!this.curves.length) {
      this.box.replaceChildren(h("p", { class: "empty" }, "no values yet"));
      return;
    }
    const steps = this.curves.flatMap((curve) => [curve.data.steps[0], curve.data.steps.at(-1)]);
    this.first = Math.min(...steps);
    this.last = Math.max(...steps);
    if (this.first === this.last) { this.first -= 0.5; this.last += 0.5; }
    const values = usualValues(this.curves.flatMap((curve) => curve.data.mean.filter((value) => value !== null)));
    [this.low, this.high] = valueRange(values);
    const clip = `clip-${Math.random().toString(36).slice(2)}`;
    this.cursor = s("line", { class: "cursor", y1: TOP, y2: this.height - BOTTOM });
    this.dots = s("g", { class: "cursor-dots" });
    this.chosen = s("rect", { class: "chosen", y: TOP, height: this.height - TOP - BOTTOM, width: 0 });
    const svg = s("svg", { viewBox: `0 0 ${this.width} ${this.height}`, height: this.height, tabindex: 0, role: "img",
      "aria-label": `${this.title} over steps. ${this.curves.map((curve) => `${curve.name}: ${short(lastOf(curve))}`).join(", ")}` },
    s("clipPath", { id: clip }, s("rect", { x: LEFT - 4, y: TOP - 4, width: this.width - LEFT - RIGHT + 8, height: this.height - TOP - BOTTOM + 5 })),
    this.bands.map((band) => this.threshold(band)), this.grid(),
    s("g", { "clip-path": `url(#${clip})` }, this.curves.map((curve) => this.curve(curve))),
    this.marks.filter((mark) => mark.step >= this.first && mark.step <= this.last).map((mark) => this.mark(mark)),
    this.chosen, this.cursor, this.dots);
    this.listen(svg);
    const focused = this.box.contains(document.activeElement);
    this.box.replaceChildren(svg);
    if (focused) svg.focus({ preventScroll: true });
    this.read(this.at);
  }

  grid() {
    const bottom = this.height - BOTTOM, levels = ticks(this.low, this.high, 5), labels = tickLabels(levels, short);
    return [
      levels.map((value, index) => [
        s("line", { class: "grid", x1: LEFT, x2: this.width - RIGHT, y1: this.y(value), y2: this.y(value) }),
        s("text", { class: "tick", x: LEFT - 7, y: this.y(value) + 3.5, "text-anchor": "end" }, labels[index]),
      ]),
      ticks(this.first, this.last, Math.max(2, Math.floor(this.width / 90)), true).map((value) => [
        s("line", { class: "axis", x1: this.x(value), x2: this.x(value), y1: bottom, y2: bottom + 4 }),
        s("text", { class: "tick", x: this.x(value), y: bottom + 17, "text-anchor": "middle" }, short(value)),
      ]),
      s("line", { class: "axis", x1: LEFT, x2: this.width - RIGHT, y1: bottom, y2: bottom }),
    ];
  }

  threshold(band) {
    const low = band.above === null ? this.low : Math.max(band.above, this.low);
    const high = band.below === null ? this.high : Math.min(band.below, this.high);
    if (low >= high) return null;
    return s("rect", { class: `threshold ${band.level}`, x: LEFT, width: this.width - LEFT - RIGHT, y: this.y(high), height: this.y(low) - this.y(high) },
      s("title", null, `${band.level}: ${band.above === null ? `below ${short(band.below)}` : `above ${short(band.above)}`}`));
  }

  curve({ colour, data, smooth = true }) {
    const { steps, mean, low, high } = data;
    const path = (values) => {
      let down = false, text = "";
      values.forEach((value, place) => {
        if (value !== null) text += `${down ? "L" : "M"}${this.x(steps[place]).toFixed(1)} ${this.y(value).toFixed(1)}${down ? "" : "h0"}`;
        down = value !== null;
      });
      return text;
    };
    const eased = smooth && this.group.smooth && steps.length >= MIN_SMOOTH;
    const parts = [s("path", { class: `raw s${colour}${eased ? " under" : ""}`, d: path(mean) })];
    if (low) {
      const there = mean.map((value, place) => place).filter((place) => mean[place] !== null);
      const edge = (values, places) => places.map((place) => `${this.x(steps[place]).toFixed(1)} ${this.y(values[place]).toFixed(1)}`);
      if (there.length) parts.unshift(s("path", { class: `band s${colour}`, d: `M${[...edge(high, there), ...edge(low, there.reverse())].join("L")}Z` }));
    }
    if (eased) {
      const inside = mean.map((value) => (value === null ? null : Math.min(Math.max(value, this.low), this.high)));
      parts.push(s("path", { class: `smooth s${colour}`, d: path(smoothed(inside)) }));
    } else if (steps.length <= MAX_DOTS) {
      mean.forEach((value, place) => {
        if (value !== null) parts.push(s("circle", { class: `dot s${colour}`, cx: this.x(steps[place]), cy: this.y(value), r: 2.6 }));
      });
    }
    return parts;
  }

  mark({ step, kind, text }) {
    const x = this.x(step), bottom = this.height - BOTTOM, tip = s("title", null, `step ${step}: ${text}`);
    if (kind === "save") return s("path", { class: "saved", d: `M${x - 3} ${bottom}h6v-6h-6z` }, tip);
    if (kind === "resume") return s("g", { class: "resumed" }, tip, s("line", { x1: x, x2: x, y1: TOP, y2: bottom }), s("text", { x: x + 3, y: TOP + 8 }, "↻"));
    return s("g", { class: `found ${kind}` }, tip, s("line", { x1: x, x2: x, y1: TOP, y2: bottom }), s("path", { d: `M${x - 5} ${TOP - 8}h10l-5 8z` }));
  }

  // ------------------------------------------------------------ reading

  read(step) {
    this.at = step;
    if (!this.cursor) return;
    const inside = step !== null && step >= this.first && step <= this.last;
    this.cursor.classList.toggle("on", inside);
    this.dots.replaceChildren();
    this.place.textContent = inside ? `step ${step}` : "";
    if (inside) { this.cursor.setAttribute("x1", this.x(step)); this.cursor.setAttribute("x2", this.x(step)); }
    this.curves.forEach((curve, index) => {
      const place = inside ? before(curve.data.steps, step) : -1;
      const value = inside ? (place < 0 ? null : curve.data.mean[place]) : lastOf(curve);
      const at = place >= 0 && curve.data.steps[place] < step && !curve.data.low ? ` @${curve.data.steps[place]}` : "";
      this.values[index].textContent = short(value) + at;
      if (place >= 0 && value !== null && value >= this.low && value <= this.high) {
        this.dots.append(s("circle", { class: `s${curve.colour}`, cx: this.x(curve.data.steps[place]), cy: this.y(value), r: 4 }));
      }
    });
  }

  snap(wanted) {
    const near = this.curves.flatMap(({ data: { steps } }) => [steps[before(steps, wanted)], steps[before(steps, wanted) + 1]]);
    return near.filter((step) => step !== undefined).reduce((best, step) => (Math.abs(step - wanted) < Math.abs(best - wanted) ? step : best));
  }

  listen(svg) {
    const { group } = this;
    const stepAt = (event) => this.first + ((event.clientX - svg.getBoundingClientRect().left - LEFT) / (this.width - LEFT - RIGHT)) * (this.last - this.first);
    let from = null;
    svg.addEventListener("pointermove", (event) => {
      const step = stepAt(event);
      group.read(this.snap(step));
      if (from === null || Math.abs(this.x(step) - this.x(from)) < 6) return;
      const [a, b] = [Math.max(this.first, Math.min(from, step)), Math.min(this.last, Math.max(from, step))];
      this.chosen.setAttribute("x", this.x(a));
      this.chosen.setAttribute("width", this.x(b) - this.x(a));
    });
    svg.addEventListener("pointerdown", (event) => { if (event.pointerType === "mouse" && event.button === 0) from = stepAt(event); });
    svg.addEventListener("pointerup", (event) => {
      if (from === null) return;
      const step = stepAt(event), start = from;
      from = null;
      this.chosen.setAttribute("width", 0);
      if (Math.abs(this.x(step) - this.x(start)) < 6) group.onstep?.(this.snap(step));
      else group.onrange?.(Math.round(Math.min(start, step)), Math.round(Math.max(start, step)));
    });
    svg.addEventListener("pointerleave", () => { from = null; this.chosen.setAttribute("width", 0); group.read(null); });
    svg.addEventListener("dblclick", () => group.onrange?.(null, null));
    svg.addEventListener("blur", () => group.read(null));
    svg.addEventListener("keydown", (event) => {
      const steps = [...new Set(this.curves.flatMap((curve) => curve.data.steps))].sort((a, b) => a - b);
      const place = this.at === null ? steps.length : before(steps, this.at);
      const next = { ArrowLeft: place - 1, ArrowRight: place + 1, Home: 0, End: steps.length - 1, PageUp: place - 20, PageDown: place + 20 }[event.key];
      if (event.key === "Enter" && this.at !== null) group.onstep?.(this.at);
      if (event.key === "Escape") group.onrange?.(null, null);
      if (next === undefined) return;
      event.preventDefault();
      group.read(steps[Math.max(0, Math.min(steps.length - 1, next))]);
    });
  }
}

const lastOf = (curve) => curve.data.mean.findLast((value) => value !== null) ?? null;

// A curve without axes, as wide as a word.
export const sparkline = (data, width = 110, height = 26) => {
  const values = data.mean.filter((value) => value !== null);
  if (values.length < 2) return h("span", { class: "spark" });
  const low = Math.min(...values), span = Math.max(...values) - low || 1;
  const line = smoothed(data.mean);
  const points = line.map((value, place) => (value === null ? null
    : `${((place / (line.length - 1)) * (width - 4) + 2).toFixed(1)} ${(height - 3 - ((value - low) / span) * (height - 6)).toFixed(1)}`));
  return s("svg", { class: "spark", viewBox: `0 0 ${width} ${height}`, width, height, "aria-hidden": "true" },
    s("path", { class: "s0 smooth", d: `M${points.filter((point) => point).join("L")}` }));
};
