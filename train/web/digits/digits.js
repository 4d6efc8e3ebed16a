/* Drawings of digits: strokes, each a list of points [x, y], and pictures of them. */

export const SIDE = 28;
const INSIDE = 20; // the longer side of what is drawn, in pixels

// How a hand writes them, in a square of side 1: strokes of corners, or points of a smooth line.
const corners = (...points) => ({points});
const smooth = (...points) => ({points, isSmooth: true});
const HANDS = [
  [[smooth([0.5, 0], [0.15, 0.25], [0.12, 0.65], [0.45, 1], [0.82, 0.75], [0.85, 0.3], [0.5, 0])]],
  [[corners([0.5, 0], [0.5, 1])], [corners([0.25, 0.25], [0.55, 0], [0.55, 1])],
    [corners([0.25, 0.25], [0.5, 0], [0.5, 1]), corners([0.2, 1], [0.8, 1])]],
  [[smooth([0.12, 0.25], [0.45, 0], [0.82, 0.25], [0.55, 0.62], [0.1, 1]),
    corners([0.1, 1], [0.9, 0.98])],
  [smooth([0.15, 0.2], [0.5, 0], [0.8, 0.25], [0.5, 0.7], [0.2, 0.95], [0.25, 0.75], [0.9, 1])]],
  [[smooth([0.15, 0.1], [0.5, 0], [0.82, 0.22], [0.45, 0.46]),
    smooth([0.45, 0.46], [0.88, 0.72], [0.55, 1], [0.1, 0.9])],
  [corners([0.15, 0], [0.8, 0], [0.45, 0.42]),
    smooth([0.45, 0.42], [0.85, 0.7], [0.5, 1], [0.12, 0.88])]],
  [[corners([0.6, 0], [0.1, 0.66], [0.95, 0.66]), corners([0.7, 0.4], [0.68, 1])],
    [corners([0.15, 0], [0.12, 0.5], [0.85, 0.5]), corners([0.8, 0], [0.78, 1])],
    [corners([0.7, 1], [0.7, 0], [0.1, 0.65], [0.95, 0.65])]],
  [[corners([0.85, 0], [0.22, 0.02], [0.18, 0.42]),
    smooth([0.18, 0.42], [0.55, 0.36], [0.85, 0.68], [0.5, 1], [0.1, 0.9])]],
  [[smooth([0.72, 0], [0.3, 0.35], [0.15, 0.75], [0.5, 1], [0.82, 0.74], [0.5, 0.52],
    [0.2, 0.75])]],
  [[corners([0.1, 0], [0.9, 0.02], [0.4, 1])],
    [corners([0.1, 0.02], [0.88, 0], [0.45, 1]), corners([0.3, 0.5], [0.8, 0.48])]],
  [[smooth([0.5, 0.47], [0.18, 0.22], [0.5, 0], [0.82, 0.22], [0.5, 0.47], [0.13, 0.76], [0.5, 1],
    [0.87, 0.76], [0.5, 0.47])],
  [smooth([0.8, 0.15], [0.45, 0], [0.2, 0.22], [0.5, 0.47], [0.82, 0.76], [0.5, 1], [0.16, 0.76],
    [0.5, 0.47], [0.8, 0.15])]],
  [[smooth([0.8, 0.28], [0.5, 0.52], [0.18, 0.28], [0.5, 0], [0.8, 0.22]),
    corners([0.8, 0.22], [0.72, 0.65], [0.6, 1])],
  [smooth([0.8, 0.25], [0.5, 0.5], [0.2, 0.25], [0.5, 0], [0.82, 0.3], [0.7, 0.9], [0.25, 0.95])]],
];

// A curve through the points (Catmull and Rom's), as short lines.
function curve(points) {
  const at = (i) => points[Math.min(Math.max(i, 0), points.length - 1)];
  const along = [];
  for (let i = 0; i + 1 < points.length; i += 1) {
    for (const t of [0, 0.25, 0.5, 0.75]) {
      along.push([0, 1].map((k) => {
        const [a, b, c, d] = [at(i - 1)[k], at(i)[k], at(i + 1)[k], at(i + 2)[k]];
        return b + 0.5 * t * (c - a + t * (2 * a - 5 * b + 4 * c - d + t * (3 * (b - c) + d - a)));
      }));
    }
  }
  return [...along, at(points.length)];
}

const spread = (random, size) => (random() + random() - 1) * size;

/** The same drawing, leant, turned, stretched and shaken, as by another try of the hand. */
export function retried(strokes, random, shake = 0.02) {
  const [turn, lean, wide] = [spread(random, 0.3), spread(random, 0.35), 1 + spread(random, 0.35)];
  const [cos, sin] = [Math.cos(turn), Math.sin(turn)];
  return strokes.map((stroke) => stroke.map(([x, y]) => {
    const [u, v] = [wide * (x - 0.5) + lean * (0.5 - y) + spread(random, shake),
      y - 0.5 + spread(random, shake)];
    return [0.5 + cos * u - sin * v, 0.5 + sin * u + cos * v];
  }));
}

/** A made-up drawing of a digit. */
export function madeUp(digit, random) {
  const hands = HANDS[digit];
  const hand = hands[Math.floor(random() * hands.length)];
  const strokes = hand.map(({points, isSmooth}) => {
    const moved = points.map(([x, y]) => [x + spread(random, 0.09), y + spread(random, 0.09)]);
    return isSmooth ? curve(moved) : moved;
  });
  return retried(strokes, random);
}

/** Moves a drawing into the middle of a square of side 1 and scales it, by its longer side. */
export function centred(strokes) {
  const points = strokes.flat();
  const [low, high] = [Math.min, Math.max].map((extreme) =>
    [0, 1].map((k) => extreme(...points.map((point) => point[k]))));
  const size = Math.max(high[0] - low[0], high[1] - low[1], 1e-3);
  return strokes.map((stroke) => stroke.map((point) =>
    point.map((value, k) => 0.5 + (value - (low[k] + high[k]) / 2) / size)));
}

// The square of the distance from a point to a line between two.
function apart([x, y], [ax, ay], [bx, by]) {
  const [dx, dy] = [bx - ax, by - ay];
  const along = ((x - ax) * dx + (y - ay) * dy) / (dx * dx + dy * dy || 1);
  const t = Math.min(Math.max(along, 0), 1);
  return (x - ax - t * dx) ** 2 + (y - ay - t * dy) ** 2;
}

/** SIDE x SIDE numbers of 0 (paper) to 1 (ink) into a place of an array. width: of the pen, in
 * pixels. */
export function paint(strokes, pixels, at, width = 2.4) {
  const edge = (SIDE - INSIDE) / 2;
  const scaled = centred(strokes).map((stroke) =>
    stroke.map((point) => point.map((value) => edge + value * INSIDE)));
  const reach = width / 2 + 0.5;
  for (const stroke of scaled) {
    stroke.forEach((b, i) => {
      const a = stroke[Math.max(i - 1, 0)];
      const from = [0, 1].map((k) => Math.max(Math.floor(Math.min(a[k], b[k]) - reach), 0));
      const to = [0, 1].map((k) => Math.min(Math.ceil(Math.max(a[k], b[k]) + reach), SIDE));
      for (let y = from[1]; y < to[1]; y += 1) {
        for (let x = from[0]; x < to[0]; x += 1) {
          const ink = reach - Math.sqrt(apart([x + 0.5, y + 0.5], a, b));
          const place = at + y * SIDE + x;
          pixels[place] = Math.max(pixels[place], Math.min(Math.max(ink, 0), 1));
        }
      }
    });
  }
}
