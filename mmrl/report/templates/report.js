"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const places = [...document.querySelectorAll("[data-figure]")];
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const hidden = new Set();
  const drawn = new Set();

  function themed(layout) {
    const colours = getComputedStyle(document.documentElement);
    const of = (name) => colours.getPropertyValue(name).trim();
    const axis = { gridcolor: of("--line"), zerolinecolor: of("--line"), linecolor: of("--line") };
    return { ...layout, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: of("--text"), size: 11 }, hoverlabel: { bgcolor: of("--back"), font: { color: of("--text") } },
      xaxis: { ...layout.xaxis, ...axis }, yaxis: { ...layout.yaxis, ...axis } };
  }

  function shown(data) {
    return data.map((trace) => ({ ...trace, visible: !(trace.meta && hidden.has(trace.meta.run)) }));
  }

  function draw(place) {
    const figure = figures[Number(place.dataset.figure)];
    drawn.add(place);
    Plotly.react(place, shown(figure.data), themed(figure.layout), { responsive: true, displaylogo: false,
      modeBarButtonsToRemove: ["select2d", "lasso2d"] });
  }

  // A page may have a hundred figures: each is drawn when it comes near the window.
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (entry.isIntersecting) { watcher.unobserve(entry.target); draw(entry.target); }
    }
  }, { rootMargin: "600px" });
  places.forEach((place) => watcher.observe(place));
  const again = () => drawn.forEach(draw);
  dark.addEventListener("change", again);
  window.addEventListener("beforeprint", () => places.forEach(draw));

  for (const box of document.querySelectorAll(".legend input")) {
    box.addEventListener("change", () => {
      const run = Number(box.dataset.run);
      if (box.checked) hidden.delete(run); else hidden.add(run);
      again();
    });
  }

  function value(cell) {
    const text = cell.dataset.value ?? cell.textContent.trim();
    const number = Number(text);
    return text === "" ? null : Number.isNaN(number) ? text : number;
  }

  function compare(a, b) {
    if (a === null || b === null) return (a === null) - (b === null);
    return typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b));
  }

  for (const table of document.querySelectorAll("table.sortable")) {
    table.querySelectorAll("th").forEach((head, column) => head.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      table.querySelectorAll("th").forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const rows = [...table.tBodies[0].rows].map((row) => [value(row.cells[column]), row]);
      rows.sort(([a], [b]) => (a === null || b === null ? compare(a, b) : (down ? -1 : 1) * compare(a, b)));
      rows.forEach(([, row]) => table.tBodies[0].append(row));
    }));
  }
})();
