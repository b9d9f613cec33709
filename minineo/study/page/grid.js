"use strict";
// Steps by positions: which keys and values each path makes, and which it finds.

// What a step does with a position: "new", "again", "cache", or "" before there is a token.
function deed(path, step, position) {
  const { start, end } = steps[step];
  if (position >= end) return "";
  if (position >= start) return "new";
  return path === "cached" ? "cache" : "again";
}

function gridTotals(path, last) {
  const totals = { new: 0, again: 0, cache: 0 };
  for (const step of steps.slice(0, last + 1)) {
    totals.new += fed(step);
    totals[path === "cached" ? "cache" : "again"] += step.start;
  }
  return totals;
}

function paintGrid(path) {
  const canvas = byId(`grid-${path}`);
  const room = canvas.parentElement.clientWidth - 40;
  const cell = Math.min(room / TOKENS, 300 / steps.length, 16);
  const tall = Math.max(cell, Math.min(120 / steps.length, 10));
  const [left, top] = [34, 2];
  const pen = prepare(canvas, left + TOKENS * cell + 4, top + steps.length * tall + 20);
  const gap = Math.min(cell, tall) > 3 ? 1 : 0;
  steps.forEach((step, index) => {
    const y = top + index * tall;
    for (let position = 0; position < step.end; position++) {
      const what = deed(path, index, position);
      const x = left + position * cell;
      if (index > state.step) {
        pen.fillStyle = colour("faint");
        pen.fillRect(x, y, cell - gap, tall - gap);
        continue;
      }
      pen.fillStyle = what === "cache" ? colour("cache-low") : colour(what);
      pen.fillRect(x, y, cell - gap, tall - gap);
      if (what === "cache" && cell > 3) {
        pen.fillStyle = colour("cache");
        pen.fillRect(x + (cell - gap) / 2 - 0.75, y + (tall - gap) / 2 - 0.75, 1.5, 1.5);
      }
    }
    if (path === "naive" && index <= state.step) {
      hatch(pen, left, y, step.start * cell - gap, tall - gap, "lines", colour("card"), 6, 0.55);
    }
  });
  const y = top + state.step * tall;
  frame(pen, left - 1.5, y - 1.5, steps[state.step].end * cell + 3 - gap, tall + 3 - gap, colour("ink"), { thick: 2 });
  const bottom = top + steps.length * tall + 11;
  write(pen, "0", left, bottom, { ink: "quiet" });
  write(pen, `position ${TOKENS - 1}`, left + TOKENS * cell, bottom, { ink: "quiet", align: "right" });
  write(pen, "step", left - 4, top + 6, { ink: "quiet", align: "right", room: state.step ? 30 : 0 });
  write(pen, String(state.step), left - 5, Math.max(y + tall / 2, state.step ? top + 18 : top + 6), { align: "right", bold: true });
}

function sayGrid(path) {
  const totals = gridTotals(path, state.step);
  const old = path === "cached" ? totals.cache : totals.again;
  const vectors = LAYERS * HEADS;
  const words =
    path === "cached"
      ? `computed ${count(totals.new)} times, reused ${count(old)} times`
      : `computed ${count(totals.new + old)} times, ${count(old)} of them again`;
  byId(`grid-${path}-says`).replaceChildren(
    element("b", {}, path === "cached" ? "Cached path" : "Naive path"),
    element("span", { class: "big" }, path === "cached" ? `${count(totals.new)} computed` : `${count(totals.new + old)} computed`),
    element(
      "p",
      { class: "quiet" },
      path === "cached"
        ? `${count(old)} times it reused what it had: none was computed twice.`
        : `${count(old)} times for nothing: ${count(old)} × ${LAYERS} layers × ${plural(HEADS, "head")} = ` +
          `${count(old * vectors)} keys, and as many values, computed again.`,
    ),
  );
  byId(`grid-${path}`).setAttribute("aria-label", `Up to step ${state.step}, the ${path} path has ${words}.`);
}

function paintGrids() {
  for (const path of ["cached", "naive"]) {
    paintGrid(path);
    sayGrid(path);
  }
  const cell = (fill, over) => (pen) => {
    pen.fillStyle = colour(fill);
    pen.fillRect(1, 1, 24, 14);
    over(pen);
  };
  fillLegend(byId("grid-legend"), [
    [cell("new", () => {}), "computed for the first time"],
    [cell("cache-low", (pen) => { pen.fillStyle = colour("cache"); for (const x of [5, 12, 19]) pen.fillRect(x, 7, 2, 2); }), "reused from the cache"],
    [cell("again", (pen) => hatch(pen, 1, 1, 24, 14, "lines", colour("card"), 6, 0.55)), "computed again"],
    [cell("faint", () => {}), "still to come"],
  ]);
}

painters.push(paintGrids);
