// Finds the drawing in a photograph, and brings it into the frame of the training images, as data/framing.py does. That
// file explains the numbers. A picture here is { width, height, values }, with brightnesses or ink from 0 to 255.

import { limit, massCentre } from "./frame.js";

const LARGE = 200, SMALL = 256;
const PEN = 8, RULE = 0.007; // half the width of a pen in a picture of SMALL pixels; the width of ruled lines, as a share
const LEAST_CONTRAST = 24, MOST_INK = 0.5, MOST_BORDER_INK = 0.2, SPECK = 0.003;
const SPANS = 0.8, FILLED = 0.55, SHEET = 0.25;
const EDGE = 16, LEAST_SHEET = 0.12, QUADRILATERAL = 0.9, DIRECTIONS = 24, FOCUS = 0.75;

const add = (numbers) => numbers.reduce((sum, number) => sum + number, 0);
const share = (numbers, test) => numbers.filter(test).length / numbers.length;
const largest = (numbers) => numbers.reduce((most, number) => Math.max(most, number));
const quantile = (numbers, part) => numbers.slice().sort()[Math.round(part * (numbers.length - 1))];

/** Changes each row of a picture, and turns rows into columns. */
function changeRows({ width, height, values }, change) {
  const rows = Array.from({ length: height }, (_, y) => change(values.subarray(y * width, (y + 1) * width)));
  const turned = new Float32Array(rows[0].length * height);
  rows.forEach((row, y) => row.forEach((value, x) => (turned[x * height + y] = value)));
  return { width: height, height: rows[0].length, values: turned };
}

/** Changes each row and then each column of a picture. */
const changeBoth = (picture, change) => changeRows(changeRows(picture, change), change);

/** Gives a row another length. Each pixel is the mean of those it covers, or lies between two. */
const scaleTo = (length) => (row) => {
  const scale = row.length / length, reach = Math.max(1, scale);
  return Float32Array.from({ length }, (_, n) => {
    const middle = (n + 0.5) * scale - 0.5;
    let [sum, weights] = [0, 0];
    for (let at = Math.max(0, Math.ceil(middle - reach)); at <= Math.min(row.length - 1, middle + reach); at++) {
      const weight = 1 - Math.abs(at - middle) / reach;
      sum += weight * row[at];
      weights += weight;
    }
    return sum / weights;
  });
};
const resize = (picture, width, height) => changeRows(changeRows(picture, scaleTo(width)), scaleTo(height));

/** Gives each pixel of a row the largest number within `radius` pixels, or with Math.min the smallest. */
const spread = (radius, choose) => (row) =>
  row.map((found, x) => {
    for (let n = Math.max(0, x - radius); n <= Math.min(row.length - 1, x + radius); n++) found = choose(found, row[n]);
    return found;
  });

/** A small copy of a picture without dark lines: the paper in its own light, and the desk around it. */
function closeLines(picture) {
  const { width, height } = picture;
  const scale = SMALL / Math.max(width, height), margin = 2 * PEN;
  const at = (row, x) => row[limit(x - margin, 0, row.length - 1)];
  const pad = (row) => Float32Array.from({ length: row.length + 2 * margin }, (_, x) => at(row, x));
  let closed = changeBoth(resize(picture, Math.round(width * scale), Math.round(height * scale)), pad);
  for (const choose of [Math.max, Math.min]) closed = changeBoth(closed, spread(PEN, choose));
  return changeBoth(closed, (row) => row.subarray(margin, -margin));
}

/** The pixels near the border, as [1, row, column, value], where row and column go from 0 to 1. */
function border({ width, height, values }) {
  const thick = Math.max(1, Math.floor(Math.min(width, height) / 20));
  const pixels = [];
  values.forEach((value, n) => {
    const [x, y] = [n % width, Math.floor(n / width)];
    if (Math.min(x, y, width - 1 - x, height - 1 - y) < thick) pixels.push([1, y / height, x / width, value]);
  });
  return pixels;
}

/** Solves linear equations by Gaussian elimination. The right side of each equation is the last number of its row. */
function solve(rows) {
  for (let n = 0; n < rows.length; n++) {
    const pivot = rows.slice(n).reduce((most, row) => (Math.abs(row[n]) > Math.abs(most[n]) ? row : most));
    [rows[rows.indexOf(pivot)], rows[n]] = [rows[n], pivot];
    const scaled = pivot.map((value) => value / pivot[n]);
    rows = rows.map((row) => (row === pivot ? scaled : row.map((value, column) => value - row[n] * scaled[column])));
  }
  return rows.map((row) => row.at(-1));
}

/** The brightnesses of the plane that fits the border best, without its outliers. */
function fitPlane(picture) {
  const pixels = border(picture);
  const values = Float32Array.from(pixels, ([, , , value]) => value);
  const middle = quantile(values, 0.5);
  const reach = Math.max(8, 2 * quantile(values.map((value) => Math.abs(value - middle)), 0.5));
  const usual = pixels.filter(([, , , value]) => Math.abs(value - middle) <= reach);
  const [base, down, across] = solve( // the normal equations
    [0, 1, 2].map((one) => [0, 1, 2, 3].map((two) => usual.reduce((sum, pixel) => sum + pixel[one] * pixel[two], 0))));
  const { width, height } = picture;
  return picture.values.map((_, n) => base + (down * Math.floor(n / width)) / height + (across * (n % width)) / width);
}

/** The threshold that divides ink into two groups with the least variance within them. */
function split(ink) {
  const step = largest(ink) / 256 || 1;
  const counts = new Float64Array(256);
  for (const found of ink) counts[Math.min(255, Math.floor(found / step))]++;
  const sum = add(counts.map((count, n) => count * n));
  let [best, threshold, below, moment] = [-1, 0, 0, 0];
  for (let n = 0; n < 255; n++) {
    below += counts[n];
    moment += counts[n] * n;
    const above = ink.length - below;
    const apart = below * above * ((sum - moment) / Math.max(1, above) - moment / Math.max(1, below)) ** 2;
    if (apart > best) [best, threshold] = [apart, (n + 1) * step];
  }
  return threshold;
}

/** Where ink [n] begins and ends, without specks. */
function span(ink) {
  const all = add(ink);
  let sum = 0;
  const shares = Array.from(ink, (found) => (sum += found / all));
  return [shares.findIndex((found) => found >= SPECK), shares.findIndex((found) => found >= 1 - SPECK) + 1];
}

/** The ink in the box around a drawing, as a picture, and whether it is `dark`; null if there is no drawing. What differs
 * from the `ground`, one number for each pixel, is ink, if it is at least `thin` pixels thick. */
function findInk({ width, height, values }, ground, thin) {
  const difference = values.map((value, n) => value - ground[n]);
  const strong = quantile(difference.map(Math.abs), 0.98);
  const dark = add(difference.filter((found) => Math.abs(found) >= strong)) < 0;
  let ink = difference.map((found) => Math.max(0, dark ? -found : found));
  const threshold = split(ink), isInk = (found) => found > threshold;
  if (thin > 1) {
    const thick = changeBoth({ width, height, values: ink.map(isInk) }, spread((thin - 1) / 2, Math.min));
    const near = changeBoth(thick, spread(thin, Math.max)).values;
    ink = ink.map((found, n) => found * near[n]);
  }
  const inked = share(ink, isInk);
  if (largest(ink) < LEAST_CONTRAST || !inked || inked > MOST_INK) return null;
  if (share(border({ width, height, values: ink }), ([, , , found]) => isInk(found)) > MOST_BORDER_INK) return null;
  const soft = { width, height, values: ink.map((found) => Math.max(0, found - threshold / 2)) };
  const turned = changeRows(soft, (row) => row);
  const rows = span(changeRows(soft, (row) => [add(row)]).values);
  const columns = span(changeRows(turned, (column) => [add(column)]).values);
  const cut = [[rows, height], [columns, width]].some(([[begin, end], side]) => begin === 0 || end === side);
  return { dark, cut, ...changeRows(changeRows(soft, (row) => row.slice(...columns)), (column) => column.slice(...rows)) };
}

/** Whether no drawing was found, or one that nearly spans the picture, or what may be a sheet on a dark desk. */
function isDoubtful(found, { width, height }) {
  if (!found || found.width > SPANS * width || found.height > SPANS * height) return true;
  const large = found.width * found.height > SHEET * width * height;
  return !found.dark && large && share(found.values, (ink) => ink > 0) > FILLED;
}

/** The ink of a grey picture, or of a sheet, whose ruled lines are left out; or null. */
function search(picture, isSheet) {
  const { width, height } = picture, longest = Math.max(width, height);
  const first = isSheet ? null : findInk(picture, fitPlane(picture), 1);
  if (!isDoubtful(first, picture) || longest <= LARGE) return first;
  const [thin, ground] = [2 * Math.round((longest * RULE) / 2) + 1, resize(closeLines(picture), width, height).values];
  for (const least of [thin, 1]) {
    const found = findInk(picture, ground, least);
    if (!isDoubtful(found, picture)) return found;
  }
  return first;
}

/** The drawing in a grey picture: its ink in the box around it, and whether it is `dark`; or null. */
export function findDrawing(picture) {
  const sheet = Math.max(picture.width, picture.height) > LARGE ? straighten(picture) : null;
  const found = sheet && search(sheet, true);
  return found && !found.cut && !isDoubtful(found, sheet) ? found : search(picture, false);
}

/** The sheet in a photograph as it is from above; or null. */
function straighten(picture) {
  const small = closeLines(picture), { width, height, values } = small;
  const [most, least] = [Math.max, Math.min].map((choose) => changeBoth(small, spread(1, choose)).values);
  const smooth = most.map((value, n) => value - least[n] < EDGE);
  let sheet = [];
  smooth.forEach((_, first) => {
    const region = smooth[first] ? [first] : [];
    smooth[first] = 0;
    let whole = true;
    for (const n of region) {
      const x = n % width, y = Math.floor(n / width);
      if (Math.min(x, y, width - 1 - x, height - 1 - y) === 0) whole = false;
      for (const next of [n - 1, n + 1, n - width, n + width]) if (smooth[next]) region.push(next), (smooth[next] = 0);
    }
    if (whole && region.length > sheet.length) sheet = region;
  });
  if (sheet.length < LEAST_SHEET * values.length) return null;
  if (add(sheet.map((n) => values[n])) / sheet.length < add(values) / values.length) return null;
  const places = sheet.map((n) => [n % width, Math.floor(n / width)]);
  const outer = Array.from({ length: DIRECTIONS }, (_, n) => {
    const [x, y] = [Math.cos, Math.sin].map((part) => part((2 * Math.PI * n) / DIRECTIONS));
    return places.reduce((far, place) => (place[0] * x + place[1] * y > far[0] * x + far[1] * y ? place : far));
  });
  let [area, corners] = [0, []];
  outer.forEach((a, n) => outer.slice(n + 1).forEach((b, m) => outer.slice(n + m + 2).forEach((c, k) =>
    outer.slice(n + m + k + 3).forEach((d) => {
      const found = ((c[0] - a[0]) * (d[1] - b[1]) - (c[1] - a[1]) * (d[0] - b[0])) / 2;
      if (found > area) [area, corners] = [found, [a, b, c, d]];
    }))));
  if (sheet.length < QUADRILATERAL * area) return null;
  const factor = picture.width / width;
  const turned = [0, 1, 2, 3].map((turn) => [...corners.slice(turn), ...corners.slice(0, turn)]);
  const seen = turned.reduce((best, other) => (uprightness(other) > uprightness(best) ? other : best))
    .map((place) => place.map((number) => (number + 0.5) * factor));
  const map = mapSquare(seen.map(([x, y]) => [x - picture.width / 2, y - picture.height / 2]));
  const focus = FOCUS * Math.max(picture.width, picture.height);
  const [across, down] = [0, 1].map((n) => Math.hypot(map[n] / focus, map[3 + n] / focus, map[6 + n]));
  const [wide, tall] = [across / down, down / across].map((ratio) => Math.round(factor * Math.sqrt(area * ratio)));
  const back = mapSquare(seen);
  const bring = (x, y) => [0, 3, 6].map((n) => back[n] * x + back[n + 1] * y + back[n + 2]);
  const straight = Float32Array.from({ length: wide * tall }, (_, n) => {
    const [x, y, scale] = bring(((n % wide) + 0.5) / wide, (Math.floor(n / wide) + 0.5) / tall);
    return interpolate(picture, x / scale - 0.5, y / scale - 0.5);
  });
  return { width: wide, height: tall, values: straight };
}

/** How far the sides of a sheet from its top left corner go to the right and down, at most 2. */
function uprightness([a, b, c, d]) {
  const [right, down] = [[a, d, b, c], [a, b, c, d]].map(([one, two, three, four]) =>
    [0, 1].map((n) => three[n] + four[n] - one[n] - two[n]));
  return right[0] / Math.hypot(...right) + down[1] / Math.hypot(...down);
}

/** The projective map, nine numbers, of the corners (0, 0), (1, 0), (1, 1) and (0, 1) to these. */
function mapSquare(corners) {
  return [...solve(corners.flatMap(([u, v], n) => {
    const [x, y] = [[0, 0], [1, 0], [1, 1], [0, 1]][n];
    return [[x, y, 1, 0, 0, 0, -x * u, -y * u, u], [0, 0, 0, x, y, 1, -x * v, -y * v, v]];
  })), 1];
}

function interpolate({ width, height, values }, x, y) {
  [x, y] = [limit(x, 0, width - 1.001), limit(y, 0, height - 1.001)];
  const at = Math.floor(y) * width + Math.floor(x), [right, down] = [x % 1, y % 1];
  const mix = (n) => values[n] * (1 - right) + values[n + 1] * right;
  return mix(at) * (1 - down) + mix(at + width) * down;
}

/** The image, brightnesses from 0 to 255, of a drawing from `findDrawing`. */
export function frameDrawing(drawing, frame, shape) {
  const scale = Math.min(frame.box, shape.height, shape.width) / Math.max(drawing.width, drawing.height);
  const [width, height] = [drawing.width, drawing.height].map((side) => Math.max(1, Math.round(side * scale)));
  const { values } = resize(drawing, width, height);
  const least = largest(values) / 4;
  const full = quantile(values.filter((ink) => ink >= least), 0.9);
  const centre = massCentre(values, { width });
  const [top, left] = [shape.height - height, shape.width - width].map((room, n) =>
    limit(Math.round(frame.centre[n] - centre[n]), 0, room));
  const image = new Uint8ClampedArray(shape.height * shape.width).fill(frame.ground);
  values.forEach((ink, n) => {
    const place = (top + Math.floor(n / width)) * shape.width + left + (n % width);
    image[place] = Math.abs(frame.ground - Math.min(255, (ink * frame.ink) / full));
  });
  return image;
}
