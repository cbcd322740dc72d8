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

export const link = (href, ...children) => h("a", { href }, ...children);
export const button = (text, onclick, props = {}) => h("button", { type: "button", onclick, ...props }, text);
export const section = (title, ...children) => h("section", null, h("h2", null, title), ...children);
export const note = (...text) => h("p", { class: "note" }, ...text);

export const table = (headings, rows, props = {}) =>
  h("div", { class: "scroll" }, h("table", props,
    headings.length ? h("thead", null, h("tr", null, headings.map((one, index) => h("th", { scope: "col", class: rows[0]?.[index]?.classList?.contains("n") ? "n" : null }, one)))) : null,
    h("tbody", null, rows.map((row) => h("tr", null, row.map((cell) =>
      cell && cell.tagName === "TD" ? cell : h("td", null, cell)))))));

export const number = (text) => h("td", { class: "n" }, text);

export const select = (options, value, onchange, props = {}) => {
  const element = h("select", { onchange: (event) => onchange(event.target.value), ...props },
    options.map(([key, text]) => h("option", { value: key }, text)));
  element.value = value;
  return element;
};
