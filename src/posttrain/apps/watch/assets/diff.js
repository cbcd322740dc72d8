// Word by word: what two texts share, and what only one of them has. Myers' algorithm (1986).
const MAX_EDITS = 1200;

export const words = (text) => text.match(/\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu) || [];

// [[kind, text]]: "same", "only-a" or "only-b".
export const wordDiff = (left, right) => {
  const a = words(left), b = words(right);
  let start = 0, endA = a.length, endB = b.length;
  while (start < endA && start < endB && a[start] === b[start]) start += 1;
  while (endA > start && endB > start && a[endA - 1] === b[endB - 1]) { endA -= 1; endB -= 1; }
  const parts = [];
  const add = (kind, text) => {
    if (!text) return;
    if (parts.length && parts.at(-1)[0] === kind) parts.at(-1)[1] += text; else parts.push([kind, text]);
  };
  add("same", a.slice(0, start).join(""));
  for (const [kind, text] of middle(a.slice(start, endA), b.slice(start, endB))) add(kind, text);
  add("same", a.slice(endA).join(""));
  return parts;
};

const middle = (a, b) => {
  const trace = [], reached = new Map([[1, 0]]);
  for (let edits = 0; edits <= Math.min(a.length + b.length, MAX_EDITS); edits += 1) {
    trace.push(new Map(reached));
    for (let k = -edits; k <= edits; k += 2) {
      const down = k === -edits || (k !== edits && (reached.get(k - 1) ?? -1) < (reached.get(k + 1) ?? -1));
      let x = down ? reached.get(k + 1) ?? 0 : (reached.get(k - 1) ?? 0) + 1;
      let y = x - k;
      while (x < a.length && y < b.length && a[x] === b[y]) { x += 1; y += 1; }
      reached.set(k, x);
      if (x >= a.length && y >= b.length) return back(trace, a, b);
    }
  }
  return [["only-a", a.join("")], ["only-b", b.join("")]]; // nothing in common that is worth finding
};

const back = (trace, a, b) => {
  const parts = [];
  let x = a.length, y = b.length;
  for (let edits = trace.length - 1; edits >= 0; edits -= 1) {
    const reached = trace[edits], k = x - y;
    const down = k === -edits || (k !== edits && (reached.get(k - 1) ?? -1) < (reached.get(k + 1) ?? -1));
    const before = down ? k + 1 : k - 1;
    const fromX = edits ? reached.get(before) ?? 0 : 0, fromY = edits ? fromX - before : 0;
    while (x > fromX && y > fromY) { x -= 1; y -= 1; parts.push(["same", a[x]]); }
    if (!edits) break;
    if (down) { y -= 1; parts.push(["only-b", b[y]]); } else { x -= 1; parts.push(["only-a", a[x]]); }
  }
  return parts.reverse();
};
