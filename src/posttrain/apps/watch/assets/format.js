// Numbers and times as people read them.
export const short = (value, digits = 4) => {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  if (size < 1e-12) return "0";
  if (size >= 1e6 || size < 1e-4) return value.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e");
  if (size >= 1e4) return Number((value / 1000).toPrecision(digits)) + "k";
  return String(Number(value.toPrecision(digits)));
};

export const count = (value) => (value === null || value === undefined ? "–" : value.toLocaleString("en"));

export const plural = (many, word) => `${count(many)} ${word}${many === 1 ? "" : "s"}`;

export const duration = (seconds) => {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${seconds.toPrecision(2)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
  if (seconds < 172800) return `${Math.floor(seconds / 3600)} h ${Math.round((seconds % 3600) / 60)} min`;
  return `${(seconds / 86400).toFixed(1)} days`;
};

export const ago = (seconds) => {
  if (seconds === null || seconds === undefined || Number.isNaN(seconds)) return "–";
  if (seconds < 5) return "now";
  for (const [size, word] of [[86400, "d"], [3600, "h"], [60, "min"]]) {
    if (seconds >= 2 * size) return `${Math.round(seconds / size)} ${word} ago`;
  }
  return `${Math.round(seconds)} s ago`;
};

export const when = (iso) => (iso ? `${String(iso).slice(0, 16).replace("T", " ")} UTC` : "–");

export const bytes = (size) => (size === undefined ? "–" : size > 2 ** 30 ? `${(size / 2 ** 30).toFixed(2)} GiB` : `${(size / 2 ** 20).toFixed(1)} MiB`);
