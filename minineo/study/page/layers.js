"use strict";
// The bill of both paths, and every layer: its window, its cache, what it reads and computes.

function tableRow(cells, tag = "td", options = {}) {
  const row = element("tr", options);
  cells.forEach((cell, place) => {
    const head = tag === "th" ? { scope: "col" } : { scope: "row" };
    row.append(place && tag === "td" ? element("td", {}, cell) : element("th", head, cell));
  });
  return row;
}

function paintBill() {
  fillBill("bill-now", stepName(state.step), [steps[state.step]]);
  fillBill("bill-all", "All steps so far", steps.slice(0, state.step + 1));
  const now = steps[state.step];
  byId("price").replaceChildren(
    "The price is memory. The cache now holds ",
    element("b", {}, bytes(now.cache_bytes)),
    `: ${now.end} tokens × ${LAYERS} layers × ${plural(HEADS, "head")} × ${DIM} numbers × 2 (key and value). ` +
      `The naive path keeps nothing. The weights, which both read, take ${bytes(facts.weight_bytes)}.`,
  );
}

// What some steps took on both paths.
function fillBill(id, title, some) {
  const fedOn = (step, path) => (path === "cached" ? fed(step) : step.end);
  const again = (step, path) => (path === "naive" ? step.start * LAYERS * HEADS : 0);
  const line = (label, value, text) => {
    const sum = (path) => some.reduce((total, step) => total + value(step, path), 0);
    const [cached, naive] = [sum("cached"), sum("naive")];
    const times = cached ? `${(naive / cached).toFixed(1)} ×` : "";
    return tableRow([label, text(cached), text(naive), times]);
  };
  byId(id).replaceChildren(
    element("caption", {}, title),
    element("thead", {}, tableRow(["", "cached", "naive", "ratio"], "th")),
    element(
      "tbody",
      {},
      line("tokens fed", fedOn, count),
      line("keys computed again", again, count),
      line("arithmetic", (step, path) => step.costs[path].flops, flops),
      line("read and written", (step, path) => step.costs[path].bytes, bytes),
      line("time", (step, path) => step.seconds[path], milliseconds),
    ),
  );
}

function paintLayers() {
  const now = steps[state.step];
  const head = tableRow(
    ["layer", "kind", "what the newest query sees", "keys seen", "cache", "read: cached", "naive", "arithmetic: cached", "naive"],
    "th",
  );
  const size = now.cache_bytes / LAYERS;
  const rows = facts.windows.map((window, layer) => {
    const seen = Math.min(window, now.end);
    const choose = element("button", { type: "button", "aria-pressed": layer === state.layer }, String(layer));
    choose.onclick = () => show({ layer });
    const picture = element("canvas", { role: "img", "aria-label": `the last ${seen} of ${now.end}` });
    paintSeen(picture, now.end, seen);
    const { cached, naive } = now.costs;
    const row = tableRow([
      choose,
      window < facts.context ? `local, ${window}` : "global",
      picture,
      seen < now.end ? `${seen} of ${now.end}` : `all ${now.end}`,
      bytes(size),
      bytes(cached.layers[layer].bytes),
      bytes(naive.layers[layer].bytes),
      flops(cached.layers[layer].flops),
      flops(naive.layers[layer].flops),
    ]);
    row.className = layer === state.layer ? "now" : "";
    return row;
  });
  byId("layer-table").replaceChildren(element("thead", {}, head), element("tbody", {}, ...rows));
  byId("layers-say").textContent =
    "Bytes and arithmetic (FLOP: one multiplication or addition of a matrix product) follow from the " +
    "shapes: weights, keys and values each time they are read, keys and values written. Most of what a cached " +
    "step reads is weights; the naive path reads the same weights and does the arithmetic of all tokens. " +
    "Local layers keep keys and values that they no longer look at: minineo’s cache does not drop them.";
}

// A bar of all positions; those before the window are dots, those seen are filled.
function paintSeen(canvas, end, seen) {
  const cell = 130 / TOKENS;
  const pen = prepare(canvas, 132, 14);
  const cut = (end - seen) * cell;
  frame(pen, 0.5, 1.5, 130, 11, colour("line"));
  hatch(pen, 1, 2, cut, 10, "dots", colour("hidden"), 4, 1);
  pen.fillStyle = colour("cache");
  pen.fillRect(1 + cut, 2, Math.max(seen * cell - cell, 0), 10);
  pen.fillStyle = colour("new");
  pen.fillRect(1 + (end - 1) * cell, 2, Math.max(cell, 2), 10);
}

painters.push(paintBill, paintLayers);
