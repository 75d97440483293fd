"use strict";
// Curves and bars as SVG. Text and grid have classes of the page's style, so that they follow its theme.
const chart = (() => {
  const MARGIN = { left: 60, right: 12, top: 30, bottom: 36 };
  const DASHES = { solid: "", dot: "2 3", dash: "7 4", dashdot: "7 3 2 3" };

  function add(parent, name, attributes, text = "") {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    Object.entries(attributes).forEach(([key, value]) => element.setAttribute(key, value));
    element.textContent = text;
    parent.append(element);
    return element;
  }

  function formatted(value, digits) {
    const size = Math.abs(value), short = Number(value.toPrecision(digits));
    return size >= 1e6 || (size > 0 && size < 1e-4) ? short.toExponential() : String(short);
  }

  // About `count` round numbers from low to high, at least `least` apart.
  function ticks(low, high, count, least = 0) {
    const raw = Math.max((high - low) / count, least);
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = power * ([1, 2, 5].find((factor) => factor * power >= raw * 0.999) ?? 10);
    const first = Math.ceil(low / step);
    return Array.from({ length: Math.max(0, Math.floor(high / step) - first + 1) }, (_, i) => (first + i) * step);
  }

  // The range of values with a share of it more on both sides; about a value that stays the same there is some, too.
  function range(values, share) {
    const low = values.reduce((a, b) => Math.min(a, b), Infinity), high = values.reduce((a, b) => Math.max(a, b), -Infinity);
    const size = Math.max(Math.abs(low), Math.abs(high));
    const more = high - low > 1e-9 * size ? (high - low) * share : 0.05 * size || 1;
    return [low - more, high + more];
  }

  // An empty figure with a linear scale from values to pixels on each side.
  function frame(place, figure, xs, ys, left = MARGIN.left) {
    place.querySelectorAll("svg, .tip").forEach((old) => old.remove());
    const width = place.clientWidth, height = figure.height;
    const right = width - MARGIN.right, low = height - MARGIN.bottom;
    const svg = add(place, "svg", { width, height, role: "img", "aria-label": figure.title });
    const title = add(svg, "text", { class: "title", x: 8, y: 19 }, figure.title);
    if (figure.explanation) add(title, "title", {}, figure.explanation);
    const x = (value) => left + ((value - xs[0]) / (xs[1] - xs[0])) * (right - left);
    const y = (value) => low - ((value - ys[0]) / (ys[1] - ys[0])) * (low - MARGIN.top);
    const back = (pixel) => xs[0] + ((pixel - left) / (right - left)) * (xs[1] - xs[0]);
    return { svg, x, y, back, left, right, low, width };
  }

  function grid(box, xs, ys, name, whole) {
    for (const tick of ticks(...xs, box.width / 90, whole ? 1 : 0)) {
      add(box.svg, "line", { class: "grid", x1: box.x(tick), x2: box.x(tick), y1: MARGIN.top, y2: box.low });
      add(box.svg, "text", { "text-anchor": "middle", x: box.x(tick), y: box.low + 14 }, formatted(tick, 6));
    }
    for (const tick of ys ? ticks(...ys, 5) : []) {
      add(box.svg, "line", { class: "grid", x1: box.left, x2: box.right, y1: box.y(tick), y2: box.y(tick) });
      add(box.svg, "text", { "text-anchor": "end", x: box.left - 5, y: box.y(tick) + 4 }, formatted(tick, 4));
    }
    add(box.svg, "text", { "text-anchor": "middle", x: (box.left + box.right) / 2, y: box.low + 30 }, name);
  }

  // Where a step stands on the axis: itself, hours since the first line, or rollouts so far.
  const PLACES = {
    step: (step) => step,
    hours: (step, run) => run.hours[step] ?? null,
    rollouts: (step, run) => (run.rollouts ? step * run.rollouts : null),
  };

  // The exponential mean of a line's values, corrected for its start; gaps stay gaps.
  function smoothed(values, weight) {
    let mean = 0, total = 0;
    return values.map((value) => {
      if (value === null) return null;
      mean = weight * mean + (1 - weight) * value;
      total = weight * total + (1 - weight);
      return mean / total;
    });
  }

  // A line as the controls of the page ask for it. Points with intervals are measured values and stay as they are.
  function viewed(line, runs, { axis, smoothing, log }) {
    const values = smoothing > 0 && !line.markers ? smoothed(line.y, smoothing) : line.y;
    const y = log ? values.map((value) => (value > 0 ? Math.log10(value) : null)) : values;
    const x = line.x.map((step) => PLACES[axis](step, runs[line.run]));
    return { ...line, x, y: y.map((value, i) => (x[i] === null ? null : value)), raw: line.y, steps: line.x, errors: log ? null : line.errors };
  }

  // A line is cut where a value is null or beyond the range; what stands alone is a point.
  function draw(box, line, [from, to]) {
    const shown = (i) => i in line.x && line.y[i] !== null && line.x[i] >= from && line.x[i] <= to;
    const group = add(box.svg, "g", { opacity: line.opacity, stroke: line.color, "stroke-width": line.width });
    let path = "";
    line.x.forEach((step, i) => {
      if (!shown(i)) return;
      const [x, y] = [box.x(step), box.y(line.y[i])];
      path += `${shown(i - 1) ? "L" : "M"}${x.toFixed(2)},${y.toFixed(2)}`;
      if (line.markers || (!shown(i - 1) && !shown(i + 1))) add(group, "circle", { cx: x, cy: y, r: 3, fill: line.color });
      const error = line.errors?.[i];
      if (error) add(group, "line", { class: "error", x1: x, x2: x, y1: box.y(line.y[i] - error), y2: box.y(line.y[i] + error) });
    });
    add(group, "path", { d: path, "data-metric": line.metric, "data-run": line.run, "stroke-dasharray": DASHES[line.dash] });
  }

  function tip(place, box, lines, at, axis) {
    place.querySelectorAll(".tip, .cursor").forEach((old) => old.remove());
    if (at === undefined) return;
    const x = box.x(at), shown = document.createElement("div");
    if (x < box.left || x > box.right) return;
    add(box.svg, "line", { class: "cursor", x1: x, x2: x, y1: MARGIN.top, y2: box.low });
    shown.className = "tip";
    shown.textContent = [`${axis} ${formatted(at, 4)}`, ...lines.flatMap((line) => {
      const i = line.x.indexOf(at);
      return i < 0 || line.raw[i] === null ? [] : [`${line.name}: ${formatted(line.raw[i], 6)}`];
    })].join("\n");
    shown.style[x > box.width / 2 ? "right" : "left"] = `${(x > box.width / 2 ? box.width - x : x) + 10}px`;
    place.append(shown);
  }

  function curves(place, figure, hidden, view) {
    const lines = figure.lines.filter((line) => !hidden.has(line.run)).map((line) => viewed(line, view.runs, view));
    const steps = lines.flatMap((line) => line.x.filter((_, i) => line.y[i] !== null));
    const xs = place.zoom ?? (steps.length ? range(steps, 0.02) : [0, 1]);
    const values = lines.flatMap((line) => line.y.flatMap((y, i) => (y === null || line.x[i] < xs[0] || line.x[i] > xs[1]
      ? [] : [y - (line.errors?.[i] ?? 0), y + (line.errors?.[i] ?? 0)])));
    const ys = values.length ? range(values, 0.06) : [0, 1];
    const box = frame(place, figure, xs, ys);
    grid(box, xs, ys, view.log ? `${view.axis} (values: powers of ten)` : view.axis, view.axis !== "hours");
    lines.forEach((line) => draw(box, line, xs));
    const at = (event) => box.back(event.clientX - box.svg.getBoundingClientRect().left);
    const closer = (to) => (best, step) => (best !== undefined && Math.abs(best - to) <= Math.abs(step - to) ? best : step);
    let start = null;
    place.point = (where) => tip(place, box, lines, where === undefined ? undefined : steps.reduce(closer(where), undefined), view.axis);
    box.svg.onpointermove = (event) => view.point(at(event));
    box.svg.onpointerleave = () => view.point(undefined);
    box.svg.onpointerdown = (event) => { start = at(event); };
    box.svg.onpointerup = (event) => {  // a stretch that was drawn over is looked at alone, until two clicks
      const ends = [start ?? at(event), at(event)].sort((a, b) => a - b);
      if (box.x(ends[1]) - box.x(ends[0]) < 8) return;
      place.zoom = ends;
      curves(place, figure, hidden, view);
    };
    box.svg.ondblclick = () => { delete place.zoom; curves(place, figure, hidden, view); };
  }

  // One bar a row, of parts one behind the other.
  function bars(place, figure) {
    const { rows, parts } = figure.bars;
    const totals = rows.map((_, row) => parts.reduce((sum, part) => sum + part.values[row], 0));
    const left = Math.min(place.clientWidth / 3, 20 + 7 * Math.max(...rows.map((name) => name.length)));
    const xs = [0, Math.max(...totals) || 1], box = frame(place, figure, xs, [0, rows.length], left);
    grid(box, xs, null, "", false);
    rows.forEach((name, row) => {
      let sum = 0;
      const top = box.y(rows.length - row), height = box.y(0) - box.y(1);
      add(box.svg, "text", { "text-anchor": "end", x: left - 5, y: top + height / 2 + 4 }, name);
      for (const part of parts) {
        const [from, to] = [box.x(sum), box.x((sum += part.values[row]))];
        const bar = add(box.svg, "rect", { x: from, y: top + height * 0.15, width: to - from, height: height * 0.7, fill: part.color });
        add(bar, "title", {}, `${name}, ${part.name}: ${formatted(part.values[row], 3)} s`);
      }
    });
    parts.forEach((part, i) => {
      const x = left + 90 * i;
      add(box.svg, "rect", { x, y: box.low + 21, width: 10, height: 10, fill: part.color });
      add(box.svg, "text", { x: x + 14, y: box.low + 30 }, part.name);
    });
  }

  return (place, figure, hidden, view) => (figure.bars ? bars(place, figure) : curves(place, figure, hidden, view));
})();
