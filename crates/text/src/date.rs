//! A date and time as a value, and its `strftime` forms.
//!
//! The crate has no clock: whoever renders a template says what time it is.

use crate::error::Error;
use std::str::FromStr;

const DAYS: [&str; 7] = [
    "Sunday",
    "Monday",
    "Tuesday",
    "Wednesday",
    "Thursday",
    "Friday",
    "Saturday",
];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS_OF_400_YEARS: i64 = 146_097;
const SECONDS_OF_DAY: i64 = 86_400;

/// A moment of the proleptic Gregorian calendar, without a time zone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DateTime {
    year: i64,
    month: u8,
    day: u8,
    hour: u8,
    minute: u8,
    second: u8,
}

impl DateTime {
    /// Midnight of a day.
    ///
    /// # Errors
    /// [`Error::Date`] if there is no such day or the year is not 1 to 9999.
    pub fn from_date(year: i64, month: u8, day: u8) -> Result<DateTime, Error> {
        if !(1..=9999).contains(&year)
            || !(1..=12).contains(&month)
            || !(1..=days_of_month(year, month)).contains(&day)
        {
            return Err(Error::Date {
                found: format!("{year}-{month}-{day}"),
            });
        }
        Ok(DateTime {
            year,
            month,
            day,
            hour: 0,
            minute: 0,
            second: 0,
        })
    }

    /// The moment `seconds` after 1970-01-01 00:00:00. Give it UTC seconds for
    /// UTC, or add the offset of a time zone for local time.
    ///
    /// # Errors
    /// [`Error::Date`] if the year is not 1 to 9999.
    pub fn from_unix_seconds(seconds: i64) -> Result<DateTime, Error> {
        // Years that begin in March put the leap day last (Richards,
        // "Calendars", in the Explanatory Supplement to the Astronomical
        // Almanac, 2013, section 15.11).
        let days = seconds.div_euclid(SECONDS_OF_DAY) + 719_468;
        let era = days.div_euclid(DAYS_OF_400_YEARS);
        let day_of_era = days.rem_euclid(DAYS_OF_400_YEARS);
        let year_of_era =
            (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let march_month = (5 * day_of_year + 2) / 153;
        let day = day_of_year - (153 * march_month + 2) / 5 + 1;
        let month = if march_month < 10 {
            march_month + 3
        } else {
            march_month - 9
        };
        let year = year_of_era + era * 400 + i64::from(month <= 2);
        let mut moment = DateTime::from_date(year, month as u8, day as u8)?;
        let second_of_day = seconds.rem_euclid(SECONDS_OF_DAY);
        moment.hour = (second_of_day / 3600) as u8;
        moment.minute = (second_of_day / 60 % 60) as u8;
        moment.second = (second_of_day % 60) as u8;
        Ok(moment)
    }

    /// `YYYY-MM-DD`.
    pub fn iso_date(&self) -> String {
        format!("{:04}-{:02}-{:02}", self.year, self.month, self.day)
    }

    /// The moment in the form that `format` asks for, in the C locale. `%-d`
    /// and its like leave out leading zeros.
    ///
    /// # Errors
    /// [`Error::DateCode`] for a code that is not known.
    pub fn format(&self, format: &str) -> Result<String, Error> {
        let mut out = String::new();
        let mut rest = format.chars();
        while let Some(c) = rest.next() {
            if c != '%' {
                out.push(c);
                continue;
            }
            let mut code = rest.next();
            let padded = code != Some('-');
            if !padded {
                code = rest.next();
            }
            out.push_str(&self.field(code, padded)?);
        }
        Ok(out)
    }

    fn field(&self, code: Option<char>, padded: bool) -> Result<String, Error> {
        let number = |value: i64, width: usize| {
            if padded {
                format!("{value:0width$}")
            } else {
                value.to_string()
            }
        };
        let hour12 = i64::from((self.hour + 11) % 12 + 1);
        let day_name = DAYS[self.day_of_week()];
        let month_name = MONTHS[usize::from(self.month) - 1];
        Ok(match code {
            Some('Y') => number(self.year, 4),
            Some('y') => number(self.year % 100, 2),
            Some('m') => number(self.month.into(), 2),
            Some('d') => number(self.day.into(), 2),
            Some('e') if padded => format!("{:2}", self.day),
            Some('e') => self.day.to_string(),
            Some('H') => number(self.hour.into(), 2),
            Some('I') => number(hour12, 2),
            Some('M') => number(self.minute.into(), 2),
            Some('S') => number(self.second.into(), 2),
            Some('j') => number(self.day_of_year(), 3),
            Some('w') => self.day_of_week().to_string(),
            Some('p') => if self.hour < 12 { "AM" } else { "PM" }.to_owned(),
            Some('A') => day_name.to_owned(),
            Some('a') => day_name[..3].to_owned(),
            Some('B') => month_name.to_owned(),
            Some('b' | 'h') => month_name[..3].to_owned(),
            Some('F') => self.format("%Y-%m-%d")?,
            Some('T') => self.format("%H:%M:%S")?,
            Some('R') => self.format("%H:%M")?,
            Some('D' | 'x') => self.format("%m/%d/%y")?,
            Some('X') => self.format("%H:%M:%S")?,
            Some('c') => self.format("%a %b %e %H:%M:%S %Y")?,
            Some('%') => "%".to_owned(),
            Some('n') => "\n".to_owned(),
            Some('t') => "\t".to_owned(),
            // A moment without a time zone prints none, as in Python.
            Some('z' | 'Z') => String::new(),
            other => {
                let minus = if padded { "" } else { "-" };
                return Err(Error::DateCode {
                    found: gguf::shown(&format!(
                        "%{minus}{}",
                        other.map(String::from).unwrap_or_default()
                    )),
                });
            }
        })
    }

    /// Days since 1 January, from 1.
    fn day_of_year(&self) -> i64 {
        (1..self.month)
            .map(|month| i64::from(days_of_month(self.year, month)))
            .sum::<i64>()
            + i64::from(self.day)
    }

    /// 0 = Sunday.
    fn day_of_week(&self) -> usize {
        let before = self.year - 1;
        // 1 January of year 1 was a Monday.
        let days = before * 365 + before / 4 - before / 100 + before / 400 + self.day_of_year();
        (days % 7) as usize
    }
}

impl FromStr for DateTime {
    type Err = Error;

    /// Midnight of a day that is written as `YYYY-MM-DD`.
    ///
    /// # Errors
    /// [`Error::Date`] if it is written otherwise or there is no such day.
    fn from_str(text: &str) -> Result<DateTime, Error> {
        let wrong = || Error::Date {
            found: gguf::shown(text),
        };
        let mut parts = text.split('-');
        let mut next = |width: usize| {
            let part = parts.next()?;
            let is_number = part.len() == width && part.bytes().all(|byte| byte.is_ascii_digit());
            is_number.then(|| part.parse::<u16>().ok()).flatten()
        };
        match (next(4), next(2), next(2), parts.next()) {
            (Some(year), Some(month), Some(day), None) => {
                DateTime::from_date(year.into(), month as u8, day as u8).map_err(|_| wrong())
            }
            _ => Err(wrong()),
        }
    }
}

fn days_of_month(year: i64, month: u8) -> u8 {
    let is_leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    match month {
        2 if is_leap => 29,
        2 => 28,
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    }
}
