#pragma once

#include <string>
#include <vector>

namespace gyre::tools {

struct ChartPoint {
  double x = 0, y = 0;
};

struct ChartSeries {
  std::string label;
  std::vector<ChartPoint> points;  // what cannot be drawn (not finite, or 0 on a log axis) is not
};

struct ChartAxis {
  std::string title;
  bool log = false;
  std::vector<double> ticks;  // empty: round numbers
};

struct Chart {
  std::string id;  // of its title and description, unique on a page
  std::string title;
  std::string description;  // for those who do not see it
  ChartAxis x, y;
  bool lines = true;  // joins the points of a series and labels its end; otherwise each point
  std::vector<ChartSeries> series;
};

// A complete <svg> element, for a page or as a file of its own. It scales with its width.
std::string svg_chart(const Chart& chart);

std::string escape_html(const std::string& text);

// Short, for people: 0.5, 16384, 1e-7.
std::string plain_number(double value);

}  // namespace gyre::tools
