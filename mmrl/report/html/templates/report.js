"use strict";
(() => {
  const { figures, runs } = JSON.parse(document.getElementById("figures").textContent);
  const places = [...document.querySelectorAll("[data-figure]")];
  const hidden = new Set();
  const drawn = new Set();

  // What the controls ask for. point: shows the values at one place of the axis in every figure that is drawn.
  const view = { runs, axis: "step", smoothing: 0, log: false, point: (where) => drawn.forEach((place) => place.point?.(where)) };

  function draw(place) {
    drawn.add(place);
    chart(place, figures[Number(place.dataset.figure)], hidden, view);
  }

  // A page may have a hundred figures: each is drawn when it comes near the window.
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (entry.isIntersecting) { watcher.unobserve(entry.target); draw(entry.target); }
    }
  }, { rootMargin: "600px" });
  places.forEach((place) => watcher.observe(place));
  const again = () => drawn.forEach(draw);
  window.addEventListener("resize", again);
  window.addEventListener("beforeprint", () => places.forEach(draw));

  for (const box of document.querySelectorAll(".legend input")) {
    box.addEventListener("change", () => {
      const run = Number(box.dataset.run);
      if (box.checked) hidden.delete(run); else hidden.add(run);
      again();
    });
  }

  const control = (name) => document.getElementById(name);
  control("axis").addEventListener("change", () => {
    view.axis = control("axis").value;
    places.forEach((place) => delete place.zoom);
    again();
  });
  control("smoothing").addEventListener("input", () => { view.smoothing = Number(control("smoothing").value); again(); });
  control("log").addEventListener("change", () => { view.log = control("log").checked; again(); });
  control("search").addEventListener("input", () => {
    const wanted = control("search").value.trim().toLowerCase();
    for (const place of places) place.hidden = !place.dataset.name.toLowerCase().includes(wanted);
    for (const section of document.querySelectorAll("section.curves")) {
      section.hidden = wanted !== "" && !section.querySelector("[data-figure]:not([hidden])");
    }
  });

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
