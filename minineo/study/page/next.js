"use strict";
// What may come next, and how far the paths lie apart in every value of every layer.

function paintCandidates() {
  const step = steps[state.step];
  const box = byId("candidates");
  if (!step.yields) {
    box.replaceChildren(element("p", {}, "A part of the prompt was fed: no token is written yet."));
    byId("difference").textContent = "";
    return;
  }
  const written = facts.tokens[step.end].id;
  box.replaceChildren(
    ...step.candidates.map((candidate) => {
      const bars = element("div", { class: "bars", "aria-hidden": "true" });
      for (const path of ["cached", "naive"]) {
        const bar = element("div", { class: `${path}-fill` });
        bar.style.width = `${100 * (candidate[path] ?? 0)}%`;
        bars.append(bar);
      }
      const best = step.best[0] === candidate.id;
      const wrong = best && step.best[1] !== candidate.id;
      return element(
        "div",
        { class: `candidate ${best ? "best" : ""}`, title: `cached ${percent(candidate.cached)}, naive ${percent(candidate.naive)}` },
        element("span", { class: "name" }, quoted(candidate)),
        bars,
        element("span", { class: "share" }, percent(candidate.cached)),
        element("span", {}, wrong ? "✗" : candidate.id === written ? "✓" : ""),
      );
    }),
  );
  const same = step.best[0] === step.best[1] ? "Both paths prefer the same token" : "✗ The paths prefer different tokens";
  const apart = step.difference === null ? "are not all numbers" : `differ by ${tiny(step.difference)} at most`;
  byId("difference").textContent =
    `Above: cached, below: naive. ✓ is what was written. ${same}; their scores for all tokens ${apart}.`;
}

// A table of layers by values: the exponent of the largest difference.
function paintLadder() {
  const { found } = facts;
  const inside = facts.values.slice(0, -2);
  const ends = facts.values.slice(-2);
  const head = tableRow(["", ...inside.map((name) => name.replace("_", " "))], "th");
  const cell = (share, layer, value) => {
    const first = found && found.step === state.step && found.layer === layer && found.value === value;
    const wrong = first || !(share <= Math.max(facts.rounding, allowed()));
    const text = Number.isNaN(share) ? "?" : share === 0 ? "0" : share > 1e9 ? "∞" : tiny(share);
    const made = element("td", {}, wrong ? `✗ ${text}` : text);
    made.className = first ? "wrong first" : wrong ? "wrong" : share === 0 ? "zero" : "";
    if (first) made.title = "the first wrong value";
    return made;
  };
  const rows = facts.windows.map((_, layer) => {
    const row = element("tr", {}, element("th", { scope: "row" }, `layer ${layer}`));
    inside.forEach((name, place) => {
      const at = (state.step * LAYERS + layer) * inside.length + place;
      row.append(cell(arrays.ladder[at], layer, name));
    });
    return row;
  });
  const last = element("tr", {}, element("th", { scope: "row" }, "after them"));
  ends.forEach((name, place) => {
    last.append(element("th", {}, name), cell(arrays["ladder.end"][2 * state.step + place], null, name));
  });
  byId("ladder").replaceChildren(element("thead", {}, head), element("tbody", {}, ...rows, last));
  byId("check-says").textContent =
    `Step ${state.step}: the largest difference between the paths in every value, as a share of the value’s ` +
    `largest number (but of 1 at least). 0 is equal bit for bit. Up to ${tiny(facts.rounding)} is rounding: ` +
    "sums are added up in another order. " +
    (found
      ? `✗ marks more than that; the first was ${placeName(found)}.`
      : `In all steps ${count(facts.values_compared)} values were held against each other: they differ by ` +
        `${tiny(facts.largest_difference)} at most.`);
}

// What was judged to be rounding, by the same passes in float64, counts as that.
const allowed = () => (facts.found ? 0 : 2 * (facts.largest_difference ?? 0));

painters.push(paintCandidates, paintLadder);
