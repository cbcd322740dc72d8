// The arithmetic of charts: ranges, round ticks, smoothing.
export const tickSize = (span, wanted) => {
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
export const tickLabels = (values, short) => {
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
export const usualValues = (values) => {
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
