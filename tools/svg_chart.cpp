#include "svg_chart.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <limits>

#include "table.h"

namespace gyre::tools {
namespace {

// Small enough that the text is still readable when a phone shows all of it.
constexpr double kWidth = 480, kHeight = 340;
constexpr double kOwnSize = 1.25;  // as a file of its own; a page sets its width
constexpr double kLeft = 58, kRight = 392, kTop = 34, kBottom = 292;
constexpr double kLabelStep = 16, kLabelGap = 21, kLetter = 9;

// Colours that differ for every kind of colour vision (Okabe and Ito's, without yellow); shapes
// differ as well.
constexpr std::array<const char*, 7> kColours = {"#000000", "#0072b2", "#009e73", "#d55e00",
                                                 "#cc79a7", "#e69f00", "#56b4e9"};

struct Range {
  double low = std::numeric_limits<double>::infinity();
  double high = -std::numeric_limits<double>::infinity();

  void add(double value) {
    low = std::min(low, value);
    high = std::max(high, value);
  }
  bool empty() const { return low > high; }
};

// Values to places along one direction.
class Scale {
 public:
  Scale(const ChartAxis& axis, Range range, double begin, double end)
      : log_(axis.log), begin_(begin), end_(end) {
    if (range.empty()) range = {1, 10};
    if (log_) {
      low_ = std::log10(range.low), high_ = std::log10(range.high);
    } else {
      low_ = std::min(0.0, range.low), high_ = range.high;
    }
    const double pad = high_ > low_ ? 0.06 * (high_ - low_) : 0.5;
    if (log_ || low_ < 0) low_ -= pad;
    high_ += pad;
    ticks_ = axis.ticks.empty() ? (log_ ? log_ticks() : linear_ticks()) : axis.ticks;
    std::erase_if(ticks_, [&](double tick) {
      const double place = log_ ? std::log10(tick) : tick;
      return !(place >= low_ && place <= high_);
    });
  }

  double at(double value) const {
    const double v = log_ ? std::log10(value) : value;
    return begin_ + (v - low_) / (high_ - low_) * (end_ - begin_);
  }
  const std::vector<double>& ticks() const { return ticks_; }

 private:
  std::vector<double> log_ticks() const {
    const bool fine = high_ - low_ < 2.5;  // few decades: 1, 2 and 5 of each
    std::vector<double> ticks;
    for (int decade = static_cast<int>(std::floor(low_)); decade <= high_; ++decade) {
      for (const double digit : {1.0, 2.0, 5.0}) {
        const double value = digit * std::pow(10.0, decade), place = std::log10(value);
        if ((fine || digit == 1.0) && place >= low_ && place <= high_) ticks.push_back(value);
      }
    }
    return ticks;
  }
  std::vector<double> linear_ticks() const {
    const double span = high_ - low_, decade = std::pow(10.0, std::floor(std::log10(span)));
    const double step = span / decade > 5 ? 2 * decade : span / decade > 2 ? decade : decade / 2;
    std::vector<double> ticks;
    for (int i = static_cast<int>(std::ceil(low_ / step)); i * step <= high_; ++i)
      ticks.push_back(i * step);
    return ticks;
  }

  bool log_;
  double begin_, end_;
  double low_ = 0, high_ = 1;
  std::vector<double> ticks_;
};

bool drawable(const Chart& chart, const ChartPoint& p) {
  return std::isfinite(p.x) && std::isfinite(p.y) && (!chart.x.log || p.x > 0) &&
         (!chart.y.log || p.y > 0);
}

std::string number(double value) { return fixed(value, 1); }

// White around the letters keeps them readable on lines.
std::string text(double x, double y, const std::string& anchor, const std::string& words) {
  return "<text paint-order=\"stroke\" stroke=\"#ffffff\" stroke-width=\"3\" x=\"" + number(x) +
         "\" y=\"" + number(y) + "\" text-anchor=\"" + anchor + "\">" + escape_html(words) +
         "</text>\n";
}

std::string line(double x1, double y1, double x2, double y2, const std::string& colour) {
  return "<line x1=\"" + number(x1) + "\" y1=\"" + number(y1) + "\" x2=\"" + number(x2) +
         "\" y2=\"" + number(y2) + "\" stroke=\"" + colour + "\"/>\n";
}

std::string path(const std::vector<ChartPoint>& points) {
  std::string list;
  for (const ChartPoint& p : points) {
    if (!list.empty()) list += ' ';
    list += number(p.x) + "," + number(p.y);
  }
  return list;
}

std::string polygon(const std::vector<ChartPoint>& corners, const std::string& fill) {
  return "<polygon points=\"" + path(corners) + "\" " + fill + "/>\n";
}

std::string marker(double x, double y, size_t index) {
  const std::string colour = kColours[index % kColours.size()];
  // After four shapes the same ones hollow.
  const std::string fill = index % 8 < 4
                               ? "fill=\"" + colour + "\" stroke=\"#ffffff\""
                               : "fill=\"#ffffff\" stroke-width=\"2\" stroke=\"" + colour + "\"";
  const double r = 5;
  switch (index % 4) {
    case 0:
      return "<circle cx=\"" + number(x) + "\" cy=\"" + number(y) + "\" r=\"4.5\" " + fill + "/>\n";
    case 1:
      return polygon({{x - 4, y - 4}, {x + 4, y - 4}, {x + 4, y + 4}, {x - 4, y + 4}}, fill);
    case 2:
      return polygon({{x, y - r}, {x + r, y + 4}, {x - r, y + 4}}, fill);
    default:
      return polygon({{x, y - r - 1}, {x + r + 1, y}, {x, y + r + 1}, {x - r - 1, y}}, fill);
  }
}

// Long labels take their room from the plot.
double right_edge(const Chart& chart) {
  size_t longest = 0;
  for (const ChartSeries& series : chart.series) longest = std::max(longest, series.label.size());
  const double labels = kLabelGap + kLetter * static_cast<double>(longest);
  return std::clamp(kWidth - labels, (kLeft + kRight) / 2, kRight);
}

class Drawing {
 public:
  explicit Drawing(const Chart& chart)
      : chart_(chart),
        right_(right_edge(chart)),
        x_(chart.x, range(&ChartPoint::x), kLeft, right_),
        y_(chart.y, range(&ChartPoint::y), kBottom, kTop) {}

  std::string svg() {
    head();
    axes();
    if (range(&ChartPoint::x).empty()) {
      out_ += text((kLeft + right_) / 2, (kTop + kBottom) / 2, "middle", "nothing to show");
    } else if (chart_.lines) {
      draw_lines();
    } else {
      draw_points();
    }
    return out_ + "</svg>\n";
  }

 private:
  Range range(double ChartPoint::*of) const {
    Range range;
    for (const ChartSeries& series : chart_.series) {
      for (const ChartPoint& p : series.points)
        if (drawable(chart_, p)) range.add(p.*of);
    }
    return range;
  }

  void head() {
    const std::string id = escape_html(chart_.id);
    out_ = "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 " + fixed(kWidth, 0) + " " +
           fixed(kHeight, 0) + "\" width=\"" + fixed(kOwnSize * kWidth, 0) + "\" height=\"" +
           fixed(kOwnSize * kHeight, 0) + "\" role=\"img\" aria-labelledby=\"" + id + "-title " +
           id +
           "-desc\" font-family=\"system-ui, sans-serif\" font-size=\"14\" fill=\"#222222\">\n" +
           "<title id=\"" + id + "-title\">" + escape_html(chart_.title) + "</title>\n" +
           "<desc id=\"" + id + "-desc\">" + escape_html(chart_.description) + "</desc>\n" +
           "<rect width=\"" + fixed(kWidth, 0) + "\" height=\"" + fixed(kHeight, 0) +
           "\" fill=\"#ffffff\"/>\n";
  }

  void axes() {
    for (const double tick : y_.ticks()) {
      out_ += line(kLeft, y_.at(tick), right_, y_.at(tick), "#dddddd");
      out_ += text(kLeft - 7, y_.at(tick) + 4, "end", plain_number(tick));
    }
    double last = -kWidth;  // where the last label stands; the next keeps its distance
    for (const double tick : x_.ticks()) {
      const double x = x_.at(tick);
      out_ += line(x, kBottom, x, kBottom + 5, "#555555");
      if (x - last < 46) continue;
      out_ += text(x, kBottom + 19, "middle", plain_number(tick));
      last = x;
    }
    out_ += line(kLeft, kBottom, right_, kBottom, "#555555");
    out_ += text((kLeft + right_) / 2, kHeight - 8, "middle", chart_.x.title);
    out_ += text(8, 18, "start", chart_.y.title);
  }

  std::vector<ChartPoint> places(const ChartSeries& series) const {
    std::vector<ChartPoint> points;
    for (const ChartPoint& p : series.points)
      if (drawable(chart_, p)) points.push_back({x_.at(p.x), y_.at(p.y)});
    return points;
  }

  void draw_lines() {
    std::vector<Label> labels;
    for (size_t i = 0; i < chart_.series.size(); ++i) {
      const std::vector<ChartPoint> points = places(chart_.series[i]);
      if (points.empty()) continue;
      out_ += "<polyline points=\"" + path(points) +
              "\" fill=\"none\" stroke-width=\"2\" stroke=\"" + kColours[i % kColours.size()] +
              "\"/>\n";
      for (const ChartPoint& p : points) out_ += marker(p.x, p.y, i);
      labels.push_back({i, points.back(), points.back().y});
    }
    label_ends(labels);
  }

  struct Label {
    size_t series;
    ChartPoint end;
    double y;
  };

  // Beside the ends of their lines, pushed apart where they would overlap, with the marker again.
  void label_ends(std::vector<Label>& labels) {
    std::sort(labels.begin(), labels.end(),
              [](const Label& a, const Label& b) { return a.y < b.y; });
    // Closer where there are more than fit.
    const double step = std::min(
        kLabelStep, (kBottom - kTop) / std::max(1.0, static_cast<double>(labels.size()) - 1));
    for (size_t i = 1; i < labels.size(); ++i)
      labels[i].y = std::max(labels[i].y, labels[i - 1].y + step);
    double room = kBottom;
    for (size_t i = labels.size(); i-- > 0; room = labels[i].y - step)
      labels[i].y = std::min(labels[i].y, room);
    for (const Label& label : labels) {
      const double x = right_ + 12;
      out_ += line(label.end.x, label.end.y, x, label.y, kColours[label.series % kColours.size()]);
      out_ += marker(x, label.y, label.series);
      out_ += text(right_ + kLabelGap, label.y + 4, "start", chart_.series[label.series].label);
    }
  }

  struct Box {
    double left, right, y;
    bool meets(const Box& other) const {
      return left < other.right && other.left < right && std::abs(y - other.y) < kLabelStep - 2;
    }
  };

  // At the height of its point, or the nearest that is free of other labels.
  static Box free_place(Box box, const std::vector<Box>& taken) {
    const double wanted = box.y;
    const auto meets_any = [&] {
      return std::any_of(taken.begin(), taken.end(),
                         [&](const Box& other) { return box.meets(other); });
    };
    for (int i = 1; meets_any() && i < 64; ++i) {
      const double off = kLabelStep * (i + 1) / 2;  // below, above, further below ...
      const double y = i % 2 == 1 ? wanted + off : wanted - off + kLabelStep / 2;
      if (y > kTop && y < kBottom) box.y = y;
    }
    return box;
  }

  void draw_points() {
    std::vector<Box> taken;
    std::string markers, labels;
    for (size_t i = 0; i < chart_.series.size(); ++i) {
      const std::string& label = chart_.series[i].label;
      for (const ChartPoint& p : places(chart_.series[i])) {
        const double x = p.x + 9;
        const Box box =
            free_place({x, x + kLetter * static_cast<double>(label.size()), p.y}, taken);
        taken.push_back(box);
        if (box.y != p.y) labels += line(p.x, p.y, x, box.y, kColours[i % kColours.size()]);
        markers += marker(p.x, p.y, i);
        labels += text(x, box.y + 4, "start", label);
      }
    }
    out_ += labels + markers;
  }

  const Chart& chart_;
  double right_;  // of the plot; labels stand beside it
  Scale x_, y_;
  std::string out_;
};

}  // namespace

std::string svg_chart(const Chart& chart) { return Drawing(chart).svg(); }

std::string escape_html(const std::string& text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      case '\'':
        out += "&#39;";
        break;
      default:
        // Control characters are not allowed in a page at all.
        out += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
    }
  }
  return out;
}

std::string plain_number(double value) {
  if (!std::isfinite(value)) return "-";
  const double size = std::abs(value);
  const bool plain = size == 0 || (size >= 0.1 && size < 1e7);
  char digits[32];
  std::snprintf(digits, sizeof(digits), plain ? "%.7g" : "%.0e", value);
  std::string text = digits;
  const size_t exponent = text.find('e');
  if (exponent != std::string::npos && text[exponent + 2] == '0') text.erase(exponent + 2, 1);
  return text;
}

}  // namespace gyre::tools
