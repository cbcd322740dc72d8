// Curves over steps, drawn as SVG at the size that there is. The pointer reads the same step in every chart of a page;
// arrow keys move it, Enter opens the step, dragging chooses a range.
// It needs no other file: the dashboard serves it as a module, a page that is one file contains it.

// ------------------------------------------------------------ elements and numbers

// Elements from data. Text always becomes a text node, so what a model wrote is never markup.
const SVG = "http://www.w3.org/2000/svg";

const fill = (element, props, children) => {
  for (const [name, value] of Object.entries(props || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, one] of Object.entries(value)) element.style.setProperty(key, one);
    else if (name === "value" || name === "checked" || name === "selected") element[name] = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
};

export const h = (tag, props, ...children) => fill(document.createElement(tag), props, children);
export const s = (tag, props, ...children) => fill(document.createElementNS(SVG, tag), props, children);

export const short = (value, digits = 4) => {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  if (size < 1e-12) return "0";
  if (size >= 1e6 || size < 1e-4) return value.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e");
  if (size >= 1e4) return Number((value / 1000).toPrecision(digits)) + "k";
  return String(Number(value.toPrecision(digits)));
};

// ------------------------------------------------------------ ranges, round ticks, smoothing

const tickSize = (span, wanted) => {
  const raw = span / Math.max(wanted, 1);
  const power = 10 ** Math.floor(Math.log10(raw));
  return [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= raw * (1 - 1e-9));
};

export const ticks = (low, high, wanted, whole = false) => {
  let size = tickSize(high - low, wanted);
  if (whole) size = Math.max(1, Math.round(size));
  const found = [];
  for (let index = Math.ceil(low / size - 1e-9); index * size <= high + size * 1e-9; index += 1) found.push(index * size);
  return found;
};

// Short texts of ticks, with as many digits as it takes to tell them apart.
const tickLabels = (values, short) => {
  const texts = values.map((value) => short(value));
  for (let digits = 1; digits < 12 && new Set(texts).size < texts.length; digits += 1) {
    values.forEach((value, index) => { texts[index] = value.toFixed(digits); });
  }
  return texts;
};

// Round at both ends, and from zero if zero is close. A constant is shown against zero.
export const valueRange = (values, wanted = 5) => {
  let low = Math.min(...values), high = Math.max(...values);
  if (!values.length) [low, high] = [0, 1];
  if (low >= 0 && low <= 0.6 * high) low = 0;
  if (high - low <= 1e-9 * Math.max(Math.abs(high), Math.abs(low))) {
    [low, high] = high ? [Math.min(low, 0), Math.max(high, 0)] : [0, 1];
  }
  const size = tickSize(high - low, wanted);
  return [Math.floor(low / size + 1e-9) * size, Math.ceil(high / size - 1e-9) * size];
};

// Without extreme spikes, which would flatten the rest of a curve.
const usualValues = (values) => {
  if (values.length < 20) return values;
  const ordered = [...values].sort((a, b) => a - b);
  const edge = Math.floor(ordered.length / 50);
  const low = ordered[edge], high = ordered[ordered.length - 1 - edge];
  const spread = Math.max(high - low, 1e-12 * Math.max(Math.abs(low), Math.abs(high)), 1e-300);
  return ordered.filter((value) => value >= low - 8 * spread && value <= high + 8 * spread);
};

// Local linear regression with Gaussian weights: it does not lag behind a trend. Gaps stay gaps.
export const smoothed = (values) => {
  const width = Math.max(3, 0.045 * values.length);
  const reach = Math.ceil(4 * width);
  return values.map((value, place) => {
    if (value === null) return null;
    let w = 0, wx = 0, wy = 0, wxx = 0, wxy = 0;
    for (let other = Math.max(0, place - reach); other <= Math.min(values.length - 1, place + reach); other += 1) {
      if (values[other] === null) continue;
      const x = other - place, weight = Math.exp(-0.5 * (x / width) ** 2), y = values[other];
      w += weight; wx += weight * x; wy += weight * y; wxx += weight * x * x; wxy += weight * x * y;
    }
    const spread = w * wxx - wx * wx;
    return spread > 1e-9 * w * w ? (wy - ((w * wxy - wx * wy) / spread) * wx) / w : wy / w;
  });
};

// Index of the last step at or before `step`, -1 if there is none.
export const before = (steps, step) => {
  let low = 0, high = steps.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] <= step) low = middle + 1; else high = middle;
  }
  return low - 1;
};

// ------------------------------------------------------------ charts

const LEFT = 46, RIGHT = 12, TOP = 14, BOTTOM = 24;
const MIN_SMOOTH = 20, MAX_DOTS = 50;

// What the charts of a page share: the step under the pointer, and what to do with a chosen step or range.
export const chartGroup = ({ onstep = null, onrange = null, latest = "" } = {}) => {
  const charts = new Set();
  return {
    charts, onstep, onrange, latest, smooth: true,
    read: (step) => charts.forEach((chart) => chart.read(step)),
    redraw: () => charts.forEach((chart) => chart.draw()),
  };
};

// `curves`: [{ name, colour, data: { steps, mean, low, high } }]. `marks`: [{ step, kind, text }]. `stacked`: bars on top
// of each other, one per step, instead of lines.
export class Chart {
  constructor(group, { title, note = "", wide = false, bands = [], id = "", unit = "", stacked = false, height = wide ? 250 : 190 }) {
    Object.assign(this, { group, title, bands, unit, stacked, height, curves: [], marks: [], at: null });
    this.legend = h("div", { class: "legend" });
    this.place = h("span", { class: "at" }, "");
    this.box = h("div", { class: "plot" });
    this.outside = h("p", { class: "note", hidden: true });
    this.element = h("figure", { class: `card chart${wide ? " wide" : ""}`, id: id || null },
      h("figcaption", null, h("h3", null, title), this.place), this.legend, this.box, note ? h("p", { class: "note" }, note) : null, this.outside);
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
    this.setRange();
    const clip = `clip-${Math.random().toString(36).slice(2)}`;
    this.cursor = s("line", { class: "cursor", y1: TOP, y2: this.height - BOTTOM });
    this.dots = s("g", { class: "cursor-dots" });
    this.chosen = s("rect", { class: "chosen", y: TOP, height: this.height - TOP - BOTTOM, width: 0 });
    const svg = s("svg", { viewBox: `0 0 ${this.width} ${this.height}`, height: this.height, tabindex: 0, role: "img",
      "aria-label": this.words() },
    s("clipPath", { id: clip }, s("rect", { x: LEFT - 4, y: TOP - 4, width: this.width - LEFT - RIGHT + 8, height: this.height - TOP - BOTTOM + 5 })),
    this.bands.map((band) => this.threshold(band)), this.grid(),
    s("g", { "clip-path": `url(#${clip})` }, this.stacked ? this.bars() : this.curves.map((curve) => this.curve(curve))),
    this.marks.filter((mark) => mark.step >= this.first && mark.step <= this.last).map((mark) => this.mark(mark)),
    this.chosen, this.cursor, this.dots);
    this.listen(svg);
    const focused = this.box.contains(document.activeElement);
    this.box.replaceChildren(svg);
    if (focused) svg.focus({ preventScroll: true });
    this.read(this.at);
  }

  // The range of the value axis, without extreme spikes; the note says what lies outside.
  setRange() {
    const known = this.curves.flatMap((curve) => curve.data.mean.filter((value) => value !== null));
    const tops = this.stacked ? this.curves[0].data.steps.map((_, place) => this.top(this.curves.length, place)) : null;
    [this.low, this.high] = valueRange(tops ? [0, ...usualValues(tops)] : usualValues(known));
    if (this.stacked) { // room for half a bar at both ends
      const half = (this.last - this.first) / Math.max(this.curves[0].data.steps.length - 1, 1) / 2;
      Object.assign(this, { first: this.first - half, last: this.last + half });
    }
    const outside = (tops ?? known).filter((value) => value < this.low || value > this.high);
    this.outside.hidden = !outside.length;
    const furthest = outside.reduce((best, value) => (Math.abs(value) > Math.abs(best) ? value : best), 0);
    this.outside.textContent = `${outside.length} of ${(tops ?? known).length} values lie outside the axis, the furthest ${short(furthest)}.`;
  }

  // The drawing in words, for those who do not see it.
  words() {
    return `${this.title} over steps. ${this.curves.map((curve) => {
      const known = curve.data.mean.filter((value) => value !== null);
      const extremes = this.stacked ? "" : `, lowest ${short(Math.min(...known))}, highest ${short(Math.max(...known))}`;
      return `${curve.name}: ${short(lastOf(curve))}${this.unit}${extremes}`;
    }).join("; ")}`;
  }

  // The sum of the first `count` curves of a stack.
  top(count, place) { return this.curves.slice(0, count).reduce((sum, curve) => sum + (curve.data.mean[place] ?? 0), 0); }

  bars() {
    const { steps } = this.curves[0].data;
    const width = Math.max(1, Math.min(60, (0.82 * (this.width - LEFT - RIGHT)) / steps.length));
    return this.curves.map(({ colour }, index) => steps.map((step, place) => {
      const top = this.y(this.top(index + 1, place)), height = this.y(this.top(index, place)) - top;
      return height > 0.05 ? s("rect", { class: `layer s${colour}`, x: this.x(step) - width / 2, y: top, width, height }) : null;
    }));
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
    this.place.textContent = inside ? `step ${step}` : this.group.latest;
    if (inside) { this.cursor.setAttribute("x1", this.x(step)); this.cursor.setAttribute("x2", this.x(step)); }
    this.curves.forEach((curve, index) => {
      const place = inside ? before(curve.data.steps, step) : -1;
      const value = inside ? (place < 0 ? null : curve.data.mean[place]) : lastOf(curve);
      const at = place >= 0 && curve.data.steps[place] < step && !curve.data.low && !this.stacked ? ` @${curve.data.steps[place]}` : "";
      this.values[index].textContent = (value === null ? "–" : short(value) + this.unit) + at;
      if (!this.stacked && place >= 0 && value !== null && value >= this.low && value <= this.high) {
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
